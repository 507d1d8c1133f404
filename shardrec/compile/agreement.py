"""The header exchange of a compiled model, as one operator: the ranks tell each other their sizes, and fail together.

A tracer cannot raise for what a tensor holds, and the words for a fault take collectives of their own. So the header is
made, sent and looked at by an operator, with the context of the eager model: same columns, same words, so that a rank
whose forward fails before it comes here can still answer for the others' (``StepContext.fail_all``). That it does more
than its result says is no danger: the sizes in the result are needed by all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardrec.compile.live import Live
from shardrec.exchange.batch import Batch, Expectation
from shardrec.exchange.check import describe_fault
from shardrec.exchange.scripted_batch import FAULTS
from shardrec.exchange.step import FIXED_COLUMNS, StepContext, checksum

__all__ = ["Agreement"]

_OUT_OF_RANGE = 1  # in FAULTS: what the eager model looks up the words for

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "agree(Tensor counts, Tensor fault, Tensor lengths, Tensor values, str[] keys, bool gradients, int number) "
    "-> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)


class _Header:
    """What the operator calls back to.

    Args:
        context: of the model.
        expect: what the module's input must look like.
    """

    def __init__(self, context: StepContext, expect: Expectation) -> None:
        self._context = context
        self._expect = expect

    def exchange(
        self, counts: Tensor, fault: Tensor, lengths: Tensor, values: Tensor, keys: Sequence[str], gradients: bool
    ) -> Tensor:
        """See :class:`Agreement`."""
        context = self._context
        dense = context.dense_signature
        agreement = (
            f"compiled, ids {str(values.dtype).removeprefix('torch.')}, gradients {'on' if gradients else 'off'}"
        )
        agreement += f", other inputs {dense}" if dense else ""
        world_size, columns = counts.shape
        header = counts.new_zeros((world_size, context.header_columns))
        header[:, 0] = fault
        header[:, 1] = checksum(agreement)
        header[:, FIXED_COLUMNS : FIXED_COLUMNS + columns] = counts
        received = context.exchange_header(header)
        number, *numbers = torch.cat([fault.flatten(), received.flatten()]).tolist()
        width = context.header_columns
        headers = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        if not context.check([one[0] for one in headers], [one[1] for one in headers], agreement):
            context.raise_faults(self._words(number, lengths, values, keys), agreement)
        told = torch.tensor([one[FIXED_COLUMNS : FIXED_COLUMNS + columns] for one in headers], dtype=torch.int64)
        sizes_first = told.roll(1, dims=1)
        return torch.cat([counts[:, :-1].flatten().cpu(), sizes_first.flatten()])

    def _words(self, number: int, lengths: Tensor, values: Tensor, keys: Sequence[str]) -> str:
        if number != _OUT_OF_RANGE:
            return FAULTS[number]
        batch = Batch(keys=tuple(keys), lengths=lengths.view(len(keys), -1), values=values, weights=None)
        return describe_fault(batch, self._expect)


_HEADERS: Live[_Header] = Live("the inputs")


@torch.library.impl(_LIBRARY, "agree", "CompositeExplicitAutograd")
def _agree(
    counts: Tensor, fault: Tensor, lengths: Tensor, values: Tensor, keys: Sequence[str], gradients: bool, number: int
) -> Tensor:
    return _HEADERS[number].exchange(counts, fault, lengths, values, keys, gradients)


def _agree_fake(
    counts: Tensor, fault: Tensor, lengths: Tensor, values: Tensor, keys: Sequence[str], gradients: bool, number: int
) -> Tensor:
    world_size, columns = counts.shape
    return torch.empty(world_size * (2 * columns - 1), dtype=torch.int64, device="cpu")


torch.library.register_fake("shardrec::agree", _agree_fake, lib=_LIBRARY)


class Agreement(nn.Module):
    """Exchanges the headers of one sharded module.

    Args:
        context: of the model.
        expect: what the module's input must look like.
    """

    def __init__(self, context: StepContext, expect: Expectation) -> None:
        super().__init__()
        self._header = _Header(context, expect)
        self.number = _HEADERS.add(self._header)

    def forward(self, counts: Tensor, fault: Tensor, lengths: Tensor, values: Tensor, keys: list[str]) -> Tensor:
        """Tell all ranks the sizes.

        Args:
            counts: (W, G + 1) int64, per rank what goes to it: ids of each group, and this rank's batch size.
            fault: 0-d int64, a number of ``FAULTS``.
            lengths: (F · B,) of the input.
            values: (N,) ids of the input.
            keys: F features.

        Returns:
            (W · G + W · (1 + G),) int64 on the CPU: ids sent; then of each rank its batch size, and the ids it sends.

        Raises:
            InputError: on every rank, for a fault of any, or if the ranks disagree.
        """
        gradients = torch.is_grad_enabled()
        told: Tensor = torch.ops.shardrec.agree(counts, fault, lengths, values, keys, gradients, self.number)
        return told
