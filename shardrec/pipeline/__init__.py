"""Skip connections between the layers of a sequential: :mod:`shardrec.pipeline.skip`."""

from shardrec.pipeline.error import PipelineError

__all__ = ["PipelineError"]
