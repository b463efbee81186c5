"""Whether each planted needle was selected: a fact of the accumulated `topk` record of needle cases."""

from dataclasses import replace

from .cases.case import Case
from .cases.needle import DEPTHS, needle_entries
from .record import Record
from .reference.inputs import LayerInputs
from .selection import as_mask
from .trace import Trace


def with_needles(records: list[Record], trace: Trace, inputs: LayerInputs, case: Case) -> list[Record]:
    """The same records; of a needle case the accumulated topk record gets `needles`.

    Each is [visible entries of its row, depth as a share of them, 1 if selected else 0].
    """
    if case.family != "needle" or "topk" not in trace:
        return records
    entries = needle_entries(inputs, case.params.get("depth", DEPTHS))
    mask = as_mask(trace.value("topk"), int(inputs.visible.max()))
    found = [
        [visible, round(entry / visible, 4), int(mask[row, entry])]
        for row, (entry, visible) in enumerate(zip(entries.tolist(), inputs.visible.tolist(), strict=True))
        if entry >= 0
    ]
    return [
        replace(record, facts={**record.facts, "needles": found})
        if record.stage == "topk" and record.comparison == "accumulated"
        else record
        for record in records
    ]
