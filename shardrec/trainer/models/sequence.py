"""SASRec and HSTU, models of the next item in a user's history: tokens in, a state for each position out, and the loss.

Linear layers and norms see a batch's tokens end to end. Attention sees them padded, rows of like length together,
because most histories are short and a few fill all positions.

Legend: B rows, T tokens (the items of all histories, row after row), D columns, N negatives.
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

Groups: TypeAlias = tuple[Tensor, Tensor, list[tuple[Tensor, int, int]]]
"""Rows of like length: the tokens by group, int64 (T,); the place of each token among these, int64 (T,); and of each
group the rows' offsets, int64 (R + 1,), the number of its tokens and the width W to pad to."""

_NARROWEST = 4
_BLOCK = 64
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
    """Makes a layer from (tokens (T, D), groups) to tokens of ``dim``, ``heads``, ``max_length`` and ``dropout``."""

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
        doublings = (_NARROWEST << power for power in range(max_length.bit_length()))
        self.widths = [*(width for width in doublings if width < max_length), max_length]
        self.positions = nn.Embedding(max_length, dim)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
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
        groups = _by_length(lengths_B, self.widths)
        for block in self.blocks:
            x_TD = block(x_TD, groups)
        encoded: Tensor = self.norm(x_TD)
        return encoded


class _SelfAttention(nn.Module):
    """Causal self-attention, then a network for each token."""

    def __init__(self, dim: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.columns = heads, dim // heads
        self.attention_norm, self.token_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project_in, self.project_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        attended: list[Tensor] = []
        for padded in _padded(self.project_in(self.attention_norm(x_TD)), groups):
            query, key, value = padded.unflatten(2, [3, self.heads, self.columns]).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended.append(mixed.transpose(1, 2).flatten(2))
        attended_TD = _flat(attended, groups)
        x_TD = x_TD + self.dropout(self.project_out(attended_TD))
        x_TD = x_TD + self.dropout(self.network(self.token_norm(x_TD)))
        return x_TD


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
        self.dim, self.heads, self.columns, self.max_length = dim, heads, dim // heads, max_length
        self.positions_at_once = _BLOCK  # TorchScript does not see the module's constants
        # Norms without a learned scale, and first values, as in the authors' code.
        self.norm, self.attended_norm = (nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.project_in, self.project_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        nn.init.normal_(self.project_in.weight, std=0.02)
        nn.init.xavier_uniform_(self.project_out.weight)
        self.bias = nn.Parameter(torch.zeros(heads, max_length))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        projected = F.silu(self.project_in(self.norm(x_TD)))
        gate_TD, others = projected[:, : self.dim], projected[:, self.dim :]
        attended: list[Tensor] = []
        for padded in _padded(others, groups):
            query, key, value = padded.unflatten(2, [3, self.heads, self.columns]).permute(2, 0, 3, 1, 4).unbind(0)
            value = value / self.max_length
            width = padded.size(1)
            position_W = torch.arange(width, device=x_TD.device)
            biases_HWW = self.bias[:, (position_W.unsqueeze(1) - position_W).clamp(min=0)]
            mixed: list[Tensor] = []
            for start in range(0, width, self.positions_at_once):
                stop = min(start + self.positions_at_once, width)
                scores = query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3) + biases_HWW[:, start:stop, :stop]
                mixed.append(F.silu(scores).tril(start) @ value[:, :, :stop])
            attended.append(torch.cat(mixed, 2).transpose(1, 2).flatten(2))
        attended_TD = _flat(attended, groups)
        mixed_TD: Tensor = x_TD + self.project_out(self.dropout(self.attended_norm(attended_TD) * gate_TD))
        return mixed_TD


class HSTU(SequenceModel):
    """Pointwise attention with a gate. Arguments as for :class:`SequenceModel`.

    "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations", Zhai et
    al., 2024. In place of softmax, each pair of positions has SiLU of its score, over ``max_length``, so that how often
    an item occurs is not normalized away. Times of the actions are not among a sequence's ids: the bias of a pair
    depends on the positions alone. The loss is SASRec's.
    """

    block = _PointwiseAttention


def _by_length(lengths_B: Tensor, widths: list[int]) -> Groups:
    tokens: list[Tensor] = []
    groups: list[tuple[Tensor, int, int]] = []
    above = 0
    for width in widths:
        rows_B = (lengths_B > above) & (lengths_B <= width)
        above = width
        tokens.append(torch.repeat_interleave(rows_B, lengths_B).nonzero().squeeze(1))
        groups.append((F.pad(lengths_B[rows_B].cumsum(0), [1, 0]), tokens[-1].size(0), width))
    order_T = torch.cat(tokens)
    places_T = torch.zeros_like(order_T).index_copy(0, order_T, torch.arange(order_T.size(0), device=order_T.device))
    return order_T, places_T, groups


def _padded(x_TD: Tensor, groups: Groups) -> list[Tensor]:
    """The tokens per group as (R, W, D)."""
    grouped = x_TD.index_select(0, groups[0]).split([size for _, size, _ in groups[2]])
    padded: list[Tensor] = []
    for part, (offsets, _, width) in zip(grouped, groups[2]):  # noqa: B905  # of TorchScript
        padded.append(torch.ops.fbgemm.jagged_to_padded_dense(part, [offsets], [width], 0.0))
    return padded


def _flat(padded: list[Tensor], groups: Groups) -> Tensor:
    """What :func:`_padded` gave, or other columns, as tokens again: (T, D)."""
    parts: list[Tensor] = []
    for part, (offsets, size, _) in zip(padded, groups[2]):  # noqa: B905  # of TorchScript
        parts.append(torch.ops.fbgemm.dense_to_jagged(part, [offsets], size)[0])
    return torch.cat(parts).index_select(0, groups[1])


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
