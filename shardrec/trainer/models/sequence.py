"""SASRec and HSTU, models of the next item in a user's history: tokens in, a state for each position out, and the loss.

Layers see a batch's rows of like length together, padded to a common width at their ends, because most histories are
short and a few fill all positions. Attention is causal, so no token sees padding::

    tokens    a0 a1 a2 │ b0 │ c0 c1 c2 c3 c4 │ d0 d1          lengths 3, 1, 5, 2
    padded    a0 a1 a2  ·   b0  ·  ·  ·   d0 d1  ·  · │ c0 c1 c2 c3 c4  ·  ·  ·    3 rows of width 4, 1 of 8

Legend: B rows, T tokens (the items of all histories, row after row), P padded positions, R rows of a group, W width, D
columns, N negatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from shardrec import ConfigError
from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models.parts import ItemCounts, Share, Size, check_one_each, item_rows
from shardrec.trainer.models.sampled_softmax import sampled_softmax_loss

Groups: TypeAlias = list[tuple[int, int]]
"""Rows of like length, one group after the other in (P, D): their number R and their width W."""

_NARROWEST = 4
"""The smallest width of a group, and the least step from one width to the next."""
_BLOCK = 256
"""Positions whose pointwise attention is computed at a time, with those before them alone."""


class SequenceModel(nn.Module):
    """Scores an item after a history. Trained to tell the next item at each position from random ones.

    Args:
        max_length: most items of a history.
        blocks: number of attention layers.
        heads: of a block's attention. Divides ``dim``.
        negatives: random items of a step, which a rank's batch shares.
        sampling: what they are: any (``uniform``); by how often they were next so far (``popularity``); or some of the
            batch's own next items (``batch``), which are looked up anyway. The last two with logQ correction.
    """

    block: ClassVar[type[nn.Module]]
    """Makes a layer from ((P, D), groups) to (P, D) of ``dim``, ``heads``, ``max_length`` and ``dropout``."""

    def __init__(
        self,
        schema: ClickSchema,
        *,
        history: str = "history",
        item: str = "item",
        dim: Size = 16,
        max_length: Size = 50,
        blocks: Size = 2,
        heads: Size = 1,
        negatives: Size = 1024,
        sampling: Literal["uniform", "popularity", "batch"] = "uniform",
        dropout: Share = 0.5,
    ) -> None:
        super().__init__()
        self.history, self.item, self.num_negatives = history, item, negatives
        self.item_features = (item,)
        self.items = item_rows(schema, dim, history=history, item=item)
        dim = self.items.embedding_dim()
        if dim % heads:
            raise ConfigError(f"dim is {dim} and heads is {heads}: give a dim that is a multiple of heads")
        self.num_items = schema.num_embeddings[schema.sparse_names.index(item)]
        self.sampling, self.counts = sampling, None if sampling == "uniform" else ItemCounts(self.num_items)
        self.widths = [min(_NARROWEST, max_length)]
        while self.widths[-1] < max_length:
            step = max(_NARROWEST, self.widths[-1] // 4)
            self.widths.append(min(self.widths[-1] + step, max_length))
        self.positions = nn.Embedding(max_length, dim)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(type(self).block(dim, heads, max_length, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The logit per row of its item after its history, 0 for an empty history: float32 (B,).

        A history is encoded once for neighbouring rows that have the same, such as the candidates for a user.
        """
        rows = self.items(sparse)
        check_one_each(sparse[self.item].lengths())
        logits: Tensor = (self._users(sparse, rows[self.history].values()) * rows[self.item].values()).sum(1)
        return logits

    def query_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """The vector of each row's history. Its product with an item's vector is a logit: float32 (B, D)."""
        return self._users(sparse, self.items(sparse)[self.history].values())

    def item_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Each row's item: float32 (B, D)."""
        rows_BD: Tensor = self.items(sparse)[self.item].values()
        return rows_BD

    def _users(self, sparse: KeyedJaggedTensor, rows_TD: Tensor) -> Tensor:
        history = sparse[self.history]
        lengths_B = history.lengths()
        differs_B = _differs_from_row_before(history.values(), lengths_B)
        encoded_B = torch.where(differs_B, lengths_B, 0)
        tokens_TD = rows_TD[torch.repeat_interleave(differs_B, lengths_B)]
        # The last token so far belongs to the row, or to an earlier row with the same history.
        encoded = F.pad(self.encode(tokens_TD, encoded_B), [0, 0, 1, 0])
        users_BD: Tensor = encoded[encoded_B.cumsum(0)] * (lengths_B > 0).unsqueeze(1)
        return users_BD

    def loss(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Softmax cross entropy of the next item at each position of the histories against random items.

        The item is the last position's next, left out where the label is 0. The mean over the positions, in nats.
        """
        history, item = sparse[self.history], sparse[self.item]
        check_one_each(item.lengths())
        rows = self.items(sparse)
        drawn = None if self.sampling == "batch" else self._drawn(labels.device)
        tokens_TD, lengths_B = rows[self.history].values(), history.lengths()
        encoded_TD = self.encode(tokens_TD, lengths_B)
        there_B = lengths_B > 0
        last = lengths_B.cumsum(0)[there_B] - 1
        next_T = history.values().roll(-1).index_copy(0, last, item.values()[there_B])
        next_TD = tokens_TD.roll(-1, 0).index_copy(0, last, rows[self.item].values()[there_B])
        weights_T = torch.ones_like(encoded_TD[:, 0]).index_copy(0, last, labels[there_B])
        if drawn is None:
            some_N = torch.randperm(next_T.numel(), device=next_T.device)[: self.num_negatives]
            drawn_N, others_ND = next_T[some_N], next_TD[some_N]
        else:
            drawn_N, others_ND = drawn[0], drawn[1][self.item].values()
        log_q = None
        if self.counts is not None:
            self.counts.add(next_T)
            log_q = self.counts.log_q(next_T), self.counts.log_q(drawn_N)
        return sampled_softmax_loss(encoded_TD, next_TD, others_ND, next_T, drawn_N, weights_T, log_q)

    def _drawn(self, device: torch.device) -> tuple[Tensor, Mapping[str, JaggedTensor]]:
        """Random items, int64 (N,), and their rows, under the item's name."""
        if self.counts is not None:
            drawn_N = self.counts.draw(self.num_negatives)
        else:
            drawn_N = torch.randint(1, self.num_items, (self.num_negatives,), device=device)
        lengths = torch.arange(2, device=device) * self.num_negatives  # none as history, all as item
        return drawn_N, self.items(KeyedJaggedTensor([self.history, self.item], drawn_N, lengths=lengths))

    def encode(self, tokens_TD: Tensor, lengths_B: Tensor) -> Tensor:
        """What each position knows of its item and those before it: float32 (T, D)."""
        fits = (lengths_B <= self.widths[-1]).all()
        torch._assert_async(fits, "a history has more items than the model's max_length (--model-arg max_length=...)")
        ends_T = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        age_T = ends_T - 1 - torch.arange(tokens_TD.size(0), device=ends_T.device)
        x_TD = self.dropout(tokens_TD * tokens_TD.size(1) ** 0.5 + self.positions(age_T))
        places_T, groups = _by_length(lengths_B, tokens_TD.size(0), self.widths)
        x_PD = x_TD.new_zeros(sum([rows * width for rows, width in groups]), x_TD.size(1))
        x_PD = x_PD.index_copy(0, places_T, x_TD)
        for block in self.blocks:
            x_PD = block(x_PD, groups)
        encoded: Tensor = self.norm(x_PD.index_select(0, places_T))
        return encoded


class Dropout(nn.Dropout):
    """On the CPU by uniform numbers, which are drawn in a quarter of the time of ``bernoulli_``."""

    def forward(self, input: Tensor) -> Tensor:
        """Any shape, float."""
        if not self.training or self.p == 0 or input.device.type != "cpu":
            return F.dropout(input, self.p, self.training)
        keep = 1 - self.p
        mask = torch.rand(input.shape, device=input.device).lt_(keep).div_(keep)
        return input * mask.to(input.dtype)


class _SelfAttention(nn.Module):
    """Causal self-attention, then a network for each token."""

    def __init__(self, dim: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.token_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project_in, self.project_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.dropout = Dropout(dropout)

    def forward(self, x_PD: Tensor, groups: Groups) -> Tensor:
        attended: list[Tensor] = []
        for query, key, value in _by_group(self.project_in(self.attention_norm(x_PD)), groups, self.heads):
            attended.append(_joined(F.scaled_dot_product_attention(query, key, value, is_causal=True)))
        x_PD = x_PD + self.dropout(self.project_out(torch.cat(attended)))
        x_PD = x_PD + self.dropout(self.network(self.token_norm(x_PD)))
        return x_PD


class SASRec(SequenceModel):
    """Causal self-attention. Arguments as for :class:`SequenceModel`.

    "Self-Attentive Sequential Recommendation", Kang and McAuley, 2018, with layer norms before each sublayer, and with
    a softmax over random items, which a batch shares, as loss.
    """

    block = _SelfAttention


class _PointwiseAttention(nn.Module):
    """Queries, keys, values and a gate per token, causal pointwise attention, and the gate.

    R rows of like length, H heads, W positions.
    """

    def __init__(self, dim: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.heads, self.max_length = dim, heads, max_length
        self.positions_at_once = _BLOCK  # TorchScript does not see the module's constants
        # Norms without a learned scale, and first values, as in the authors' code.
        self.norm, self.attended_norm = (nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.project_in, self.project_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        nn.init.normal_(self.project_in.weight, std=0.02)
        nn.init.xavier_uniform_(self.project_out.weight)
        self.bias = nn.Parameter(torch.zeros(heads, max_length))
        self.dropout = Dropout(dropout)

    def forward(self, x_PD: Tensor, groups: Groups) -> Tensor:
        gate_PD, others = F.silu(self.project_in(self.norm(x_PD))).split([self.dim, 3 * self.dim], 1)
        position_W = torch.arange(groups[-1][1], device=x_PD.device)
        age_WW = position_W.unsqueeze(1) - position_W
        # SiLU of so low a score is 0, and so is its gradient. Of -inf it is nan.
        bias_HWW = self.bias[:, age_WW.clamp(min=0)].masked_fill(age_WW < 0, -1e4)
        attended: list[Tensor] = []
        for query, key, value in _by_group(others, groups, self.heads):
            mixed: list[Tensor] = []
            width = query.size(2)
            for start in range(0, width, self.positions_at_once):
                stop = min(start + self.positions_at_once, width)
                scores = query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3) + bias_HWW[:, start:stop, :stop]
                mixed.append(F.silu(scores) @ value[:, :, :stop])
            attended.append(_joined(torch.cat(mixed, 2)))
        attended_PD = torch.cat(attended) / self.max_length
        mixed_PD: Tensor = x_PD + self.project_out(self.dropout(self.attended_norm(attended_PD) * gate_PD))
        return mixed_PD


class HSTU(SequenceModel):
    """Pointwise attention with a gate. Arguments as for :class:`SequenceModel`.

    "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations", Zhai et
    al., 2024. In place of softmax, each pair of positions has SiLU of its score, over ``max_length``, so that how often
    an item occurs is not normalized away. Times of the actions are not among a sequence's ids: the bias of a pair
    depends on the positions alone. The loss is SASRec's.
    """

    block = _PointwiseAttention


def _by_length(lengths_B: Tensor, tokens: int, widths: list[int]) -> tuple[Tensor, Groups]:
    """The place of each of the tokens among the padded positions, int64 (T,), and the groups."""
    widths_G = torch.tensor(widths, device=lengths_B.device)
    group_B = torch.bucketize(lengths_B, widths_G)
    order_B = group_B.argsort(stable=True)
    width_B = widths_G[group_B[order_B]]
    starts_B = torch.zeros_like(lengths_B).index_copy(0, order_B, width_B.cumsum(0) - width_B)
    shift_B = starts_B - lengths_B.cumsum(0) + lengths_B
    places_T = torch.repeat_interleave(shift_B, lengths_B, output_size=tokens)
    groups: list[tuple[int, int]] = []
    rows_G: list[int] = torch.bincount(group_B, minlength=len(widths)).tolist()
    for rows, width in zip(rows_G, widths):  # noqa: B905  # of TorchScript
        if rows > 0 or width == widths[-1]:
            groups.append((rows, width))
    return places_T + torch.arange(tokens, device=lengths_B.device), groups


def _by_group(projected: Tensor, groups: Groups, heads: int) -> list[list[Tensor]]:
    """Queries, keys and values of each group, (R, H, W, C) of H heads with C columns, from (P, 3 D)."""
    by_group: list[list[Tensor]] = []
    parts = projected.split([rows * width for rows, width in groups])
    for part, (rows, width) in zip(parts, groups):  # noqa: B905  # of TorchScript
        shape = [rows, width, heads, part.size(1) // (3 * heads)]
        by_group.append([columns.view(shape).transpose(1, 2) for columns in part.chunk(3, 1)])
    return by_group


def _joined(attended_RHWC: Tensor) -> Tensor:
    """A group's positions with the columns of all heads: (R W, D)."""
    return attended_RHWC.transpose(1, 2).flatten(2).flatten(0, 1)


def _differs_from_row_before(ids_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Whether each row has other ids than the previous row: bool (B,). True for the first row."""
    starts_B = lengths_B.cumsum(0) - lengths_B
    row_T = torch.repeat_interleave(lengths_B)
    shift_T = (starts_B - starts_B.roll(1))[row_T]
    before_T = torch.arange(ids_T.numel(), device=ids_T.device) - shift_T
    changed_T = ids_T != ids_T[before_T.clamp(0, max(0, ids_T.numel() - 1))]
    changes_B = torch.zeros_like(lengths_B).index_add(0, row_T, changed_T.long())
    differs_B = (changes_B > 0) | (lengths_B != lengths_B.roll(1))
    return differs_B.index_fill(0, torch.zeros_like(lengths_B[:1]), True)
