"""The first screen of a command's help: what it does, examples, and the options that most people set.

`--help all` lists every option. A test reads each example and each option as the command does.
"""

from __future__ import annotations

from typing import NamedTuple


class Screen(NamedTuple):
    """What the first screen of a command shows.

    Attributes:
        purpose: What the command does, in a sentence or two.
        examples: Words behind `mmod`, and what they do.
        options: Options with the form of their values, and what they mean.
        page: The page of the docs.
    """

    purpose: str
    examples: dict[str, str]
    options: dict[str, str]
    page: str


_OUTPUT = {"--output FOLDER": "the run folder; the same command resumes an interrupted run there"}
_PRINT = {"--print_config": "print the whole config, with defaults, and end"}
_TRAINING = {
    **_OUTPUT,
    "--model.checkpoint RUN_OR_FILE": "start from these weights",
    "--dry-run": "check everything and print what the run costs; trains nothing",
}
_LOADED = {
    "--model.checkpoint RUN_OR_FILE": "the weights, where a config is named",
    "--data.root FOLDER": "other data; also --data.val_split, --data.val_limit",
}
SCREENS = {
    "advise MODEL": Screen(
        "Try ways to make a model cheaper without training, on your images or prompts and this machine, and say which "
        "to use.",
        {
            "advise runs/flowers --images photos": "a trained run, or the last checkpoint of an unfinished one",
            "advise vit_small_patch16_224.augreg_in21k_ft_in1k --images photos --faster 1.4": "at a wanted speed",
            "advise runs/vlm/mine --prompts questions.json --images pictures": "a vision-language model",
        },
        {
            "--images FOLDER": "images, perhaps in a folder for each class",
            "--prompts FILE": "conversations in LLaVA's format",
            "--faster TIMES": "a wanted speed-up: what loses least at it",
            "--tolerance SHARE": "what may be lost: 0.02 are 2 points (0.02)",
            "--number N": "images or prompts to use (256)",
            "--batch_size N": "images or prompts of a timed batch (8)",
            "--image_size PIXELS": "side of images; the model's unless given",
            "--checkpoint FILE": "weights in place of the published ones",
            "--measure MEASURE": "what must stay equal: top1, features of a model without a head, or patches",
            "--output FOLDER": "folder of the result (runs/advise/MODEL/IMAGES, with other options in its name)",
        },
        "before_you_commit.md",
    ),
    "tradeoff CONFIG": Screen(
        "Compare ways to make a model cheaper: accuracy, FLOPs, time and memory of each beside the dense model and "
        "controls, and which to use.",
        {
            "tradeoff digits-smallest": "a trial of the installation, in half a minute: its figures mean nothing",
            "tradeoff my-model --dense runs/flowers": "your run, on its evaluation data; nothing is trained",
            "tradeoff my-model --dense runs/flowers --tune true": "all models fine-tuned alike",
            'tradeoff my-model --dense runs/flowers --tune true --budgets "[0.7]"': "a few: those of one share of the "
            "FLOPs; `mmod configs my-model` has the series",
        },
        {
            "--dense RUN_OR_CONFIG": "the dense model: a run folder or a training config",
            "--dense.KEY VALUE": "another value of a key of that config, as --dense.data.batch_size 16",
            "--tune true": "fine-tune all models alike; `others`: all but the dense one; `false`: none",
            "--tolerance SHARE": "what may be lost: 0.02 are 2 points (0.02)",
            "--finetune.epochs N": "as for any key of the training config, in fine-tuning",
            "--seeds N": "repeat the training: intervals are then over training runs",
            "--latency_batch N": "the batch size that you will run, to be timed; `--latency_batches`: further ones",
            "--processes N": "models that are trained at the same time",
            "--output FOLDER": "folder of the result; the same command resumes a stopped study there",
            **_PRINT,
        },
        "own_study.md",
    ),
    "train image CONFIG": Screen(
        "Train an image classifier, dense or changed.",
        {
            "train image digits/dense": "a dense model of digits, in minutes",
            "train image flowers.yaml --epochs 1 --schedule.warmup_epochs 0 --data.train_limit 100": "a first try",
            "train image flowers.yaml --output runs/gradual --model.pretrained false --model.checkpoint runs/flowers "
            '--routing "{preset: gradual}"': "routed, from the dense run",
        },
        {
            **_TRAINING,
            '--routing "{preset: NAME}"': "route the model; --routing null is the dense one",
            "--data.root FOLDER": "images, as FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE",
            "--data.batch_size N": "images of a batch",
            "--epochs N": "passes over the training data",
            "--optim.lr RATE": "learning rate",
            "--seed N": "determines every random draw",
            **_PRINT,
        },
        "training.md",
    ),
    "train pairs CONFIG": Screen(
        "Train a CLIP model of open_clip on image-text pairs, dense or routed.",
        {
            "train pairs clip/scenes": "a small dense model of drawn scenes, in minutes",
            "train pairs clip/scenes-a-mod": "both towers routed, from the dense run",
            "train pairs clip/scenes --dry-run": "what a run costs",
        },
        {
            **_TRAINING,
            '--routing "{image: {preset: NAME}}"': "route the image tower, the `text` tower, or both",
            "--data.train FILE": "the pairs to train on",
            "--data.val FILE": "those to evaluate on",
            "--data.batch_size N": "pairs of a batch",
            "--epochs N": "passes over the training data",
            "--optim.lr RATE": "learning rate",
            **_PRINT,
        },
        "open_clip.md",
    ),
    "train chat CONFIG": Screen(
        "Fine-tune a vision-language model of transformers on image conversations, dense or routed.",
        {
            "train chat vlm/tiny-llava": "a tiny LLaVA on drawn scenes, in minutes",
            "train chat vlm/own-conversations --dry-run": "check your conversations, and what a run costs",
            'train chat vlm/own-conversations --routing "{language: {preset: p-mod}}"': "routed",
        },
        {
            **_TRAINING,
            '--routing "{language: {preset: NAME}}"': "route the language model, the `image` tower, or both",
            "--data.train FILE": "conversations in LLaVA's format to train on",
            "--data.val FILE": "those to evaluate on",
            "--data.images FOLDER": "their images",
            '--lora "{r: 16, target_modules: all-linear}"': "train adapters in place of the weights",
            "--trainer.learning_rate RATE": "as any argument of transformers' TrainingArguments",
            **_PRINT,
        },
        "finetuning_vlm.md",
    ),
    "train text CONFIG": Screen(
        "Train a causal language model on text, byte by byte, dense or routed.",
        {
            "train text text/dense": "a small dense model",
            "train text text/mod": "Mixture-of-Depths, as it was first proposed",
            "train text text/mod --dry-run": "what a run costs",
        },
        {
            **_TRAINING,
            '--routing "{preset: NAME}"': "route the model",
            "--data.length N": "bytes of a window",
            "--data.batch_size N": "windows of a batch",
            "--epochs N": "passes over the training data",
            "--optim.lr RATE": "learning rate",
            "--seed N": "determines every random draw",
            **_PRINT,
        },
        "text.md",
    ),
    "isoflop CONFIG": Screen(
        "Compare language models of several sizes, dense and routed, each at its best learning rate, at equal FLOPs of "
        "training.",
        {
            "isoflop isoflop/text --dry-run": "what would be trained",
            "isoflop isoflop/text --processes 2": "the study",
            "isoflop isoflop/text --seeds 1 --output runs/isoflop/once": "with one seed",
        },
        {
            "--dense CONFIG": "training config of the dense model",
            '--budgets "[1.0e14]"': "FLOPs of a training run",
            '--rates "[1.0e-3]"': "learning rates that are tried for every model",
            "--seeds N": "repeat every run",
            "--processes N": "models that are trained at the same time",
            "--output FOLDER": "folder of the result; a stopped study resumes there",
            "--dry-run": "describe the study; trains nothing",
            **_PRINT,
        },
        "text.md",
    ),
    "evaluate CONFIG_OR_RUN": Screen(
        "Print score, FLOPs, parameters and times of a trained model of any kind.",
        {
            "evaluate runs/flowers": "the final model of a run, on its evaluation data",
            "evaluate runs/flowers --data.root other-flowers": "on other data",
            "evaluate digits/dense --model.checkpoint runs/digits/dense": "by a config",
        },
        {
            **_LOADED,
            '--routing "{preset: NAME}"': "route the model before it is evaluated",
            "--data.batch_size N": "samples of a batch",
            "--device NAME": "cpu, cuda ...; the GPU if there is one",
            **_PRINT,
        },
        "training.md",
    ),
    "audit CONFIG_OR_RUN": Screen(
        "Test what the routers of a trained model learned: its score with other tokens than those that they choose.",
        {
            "audit runs/digits/a-mod": "a run",
            "audit runs/digits/a-mod --audit.reference runs/digits/dense": "beside the dense run",
            "audit digits/a-mod --model.checkpoint runs/digits/a-mod": "by a config",
        },
        {
            **_LOADED,
            "--audit.reference RUN": "a dense run of the same kind, to compare with",
            '--audit.conditions "[random, stride]"': "choices of tokens to compare",
            "--audit.draws N": "random choices per image",
            '--audit.shifts "[noise, blur]"': "changes of the images to compare on",
            "--audit.maps N": "images over which routing is drawn",
            "--output FOLDER": "the results go to its folder `audit`",
            **_PRINT,
        },
        "auditing.md",
    ),
    "plan CONFIG_OR_RUN": Screen(
        "Search, without training, which tokens may miss which operator of a trained model for a budget.",
        {
            "plan runs/digits/dense": "half of the FLOPs",
            "plan runs/digits/dense --plan.budget 0.7": "70 % of them",
            "plan runs/digits/dense --plan.cost milliseconds --plan.budget 20": "a pass of 20 ms",
        },
        {
            **_LOADED,
            "--plan.budget SHARE": "share of the dense model's cost, or milliseconds (0.5)",
            "--plan.cost UNIT": "flops, milliseconds, or of language models cache or image_flops",
            "--plan.batches N": "batches to measure with (4)",
            "--plan.batch_size N": "samples of a batch (16)",
            "--output FOLDER": "the results go to its folder `plan`",
            **_PRINT,
        },
        "planning.md",
    ),
}
"""First screens by command; the help of other commands is short as it is."""


def first_screen(command: str) -> str:
    """Return the first screen of a command that has one."""
    screen = SCREENS[command]
    name = " ".join(["mmod", *(word for word in command.split() if word.islower())])
    examples = [f"  # {meaning}\n  mmod {words}" for words, meaning in screen.examples.items()]
    width = max(map(len, screen.options)) + 2
    options = [f"  {option:<{width}}{meaning}" for option, meaning in screen.options.items()]
    value = "[--key value] [--group.key value]"
    if command == "advise MODEL":
        # Advice has options of its own in place of a config.
        value = "[--option value]"
    return "\n".join(
        [
            f"usage: mmod {command} {value}",
            "",
            screen.purpose,
            "",
            "Examples:",
            *examples,
            "",
            "Options that most people set:",
            *options,
            "",
            f"All options: `{name} --help all`. Guide: docs/{screen.page}",
        ]
    )
