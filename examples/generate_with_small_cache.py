"""Route a language model, generate with a cache that holds kept tokens alone, save it and load it again.

python examples/generate_with_small_cache.py              # small, random weights
python examples/generate_with_small_cache.py --model meta-llama/Llama-3.2-1B
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import mmod


def main() -> None:
    """Route, generate, save and load the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a causal language model; without one, a small random one")
    options = parser.parse_args()

    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    # Each token is decided alone, which generation needs: its score against a threshold.
    config = mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.5),
        gate=mmod.Gate("sigmoid", scale=0.1),
        language=mmod.LanguageRouting(tokens="all", inference_threshold=0.5),
    )
    mmod.route_(model.eval(), config)

    prompt = torch.randint(3, model.config.vocab_size, (1, 48))
    with torch.no_grad():
        _, cache = model(prompt, use_cache=True, return_dict=False)
    print("cached tokens per layer:", [layer.keys.shape[2] for layer in cache.layers])
    print(mmod.flops(model, mmod.Prompt(text_tokens=48), kept=0.5))

    words = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = mmod.load_pretrained(folder)
    same = again.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    print("loaded again, routed:", mmod.is_routed(again), "| same words:", torch.equal(words, same))


if __name__ == "__main__":
    main()
