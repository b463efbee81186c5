"""The eighteen field reports that every path is held to first: a small input, its contract and its fault each."""

from .field_report import FieldReport
from .reports_attention import ATTENTION_REPORTS
from .reports_compressor import COMPRESSOR_REPORTS
from .reports_keys import KEY_REPORTS
from .reports_topk import TOPK_REPORTS

FIELD_REPORTS: dict[str, FieldReport] = {
    report.id: report for report in (*TOPK_REPORTS, *KEY_REPORTS, *COMPRESSOR_REPORTS, *ATTENTION_REPORTS)
}
"""By id, as `t1-candidate-buffer`."""
