"""How a model is made from a name: `open_model`, a file for each library, and weights from any training script.

`open.py` tells the forms of a name apart. `timm.py`, `open_clip.py`, `transformers.py` (image models) and `language.py`
(models that read text) make the model, `runs.py` knows the folder of a training run, and `weights.py` and `foreign.py`
read checkpoints. What configs know of their runs is in `mmod/training/opened.py`. Folders that mmod saved are
built again by the adapters (`mmod.load_pretrained`).
"""
