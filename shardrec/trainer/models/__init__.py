"""Models with settings: click models and sequence models of the literature, as plain TorchRec modules.

``Model(schema, **arguments)`` makes a module from (dense (B, M) float32, sparse KeyedJaggedTensor) to logits (B,) or
(B, 1), or columns for several labels, its tables on meta: for ``shardrec train --model NAME --model-arg NAME=VALUE``,
or for :func:`shardrec.shard`. docs/models.md has papers, arguments and commands. Importing this package does not import
torch.

Arguments that several models have are said here once:

    schema       names and table sizes of the features, a shardrec.trainer.data.ClickSchema
    dim          columns of a table
    hidden       widths of the layers before the logit
    dropout      share of a hidden layer's values that training sets to 0
    batch_norm   whether hidden layers are normalized over a rank's batch
    history      feature of the items so far, a sequence
    item         feature of the item to score, one id a row, which shares the history's table
"""

__all__ = ["MODELS"]

MODELS = {
    name: f"shardrec.trainer.models.{place}"
    for name, place in {
        "dlrm": "dlrm:DLRM",
        "dcn": "dlrm:DCN",
        "dnn": "dnn:DNN",
        "deepfm": "deepfm:DeepFM",
        "finalmlp": "finalmlp:FinalMLP",
        "din": "din:DIN",
        "sasrec": "sequence:SASRec",
        "hstu": "sequence:HSTU",
        "two_tower": "two_tower:TwoTower",
        "lightgcn": "lightgcn:LightGCN",
        "mmoe": "ple:MMoE",
        "ple": "ple:PLE",
    }.items()
}
"""The class per model, as ``package.module:Model``, by the model's name on the command line."""
