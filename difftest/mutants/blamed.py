"""What `difftest blame` says about a mutant, for the matrix."""

from ..diagnose.blame import blame_result
from ..policy import Policy
from .bench import Comparison


def sentence(made: Comparison, policy: Policy) -> str:
    """As "bug at index_k; index_k 98% of selection"; the answer alone where no share could be measured."""
    found = blame_result(made.result, made.inputs, made.oracle, made.path, policy)
    if found.largest is None:
        return found.answer
    stage, share = found.largest
    return f"{found.answer}; {stage} {round(100 * share)}% of {found.primary}"
