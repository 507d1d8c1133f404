"""Models with settings: click models and sequence models of the literature, as plain TorchRec modules.

``Model(schema, **arguments)`` makes a module from (dense (B, M) float32, sparse KeyedJaggedTensor) to logits (B,) or
(B, 1), or those of several labels, its tables on meta: for ``shardrec train --model NAME --model-arg NAME=VALUE``, or
for :func:`shardrec.shard`. docs/models.md has papers, arguments and commands. Importing this package does not import
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

_NAMES = (
    "dlrm=DLRM dcn=DCN dnn=DNN deepfm=DeepFM finalmlp=FinalMLP din=DIN sasrec=SASRec hstu=HSTU two_tower=TwoTower "
    "lightgcn=LightGCN mmoe=MMoE ple=PLE"
)
MODELS: dict[str, str] = dict(pair.split("=") for pair in _NAMES.split())
"""The class of each model, by the model's name on the command line, which is also its file's."""
