"""The live change on SGLang 0.5.23: the object ``specdec`` through a request that carries numbers alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.sglang_plugin.sglang_0_5_23.live_change import flatten, nest

CHANGES = st.dictionaries(
    st.sampled_from(["threshold", "resume_threshold", "dwell_steps", "unknown"]),
    st.none() | st.integers(-5, 2**40),
    min_size=1,
)


@given(CHANGES, st.dictionaries(st.sampled_from(["pp_max_micro_batch_size", "other"]), st.integers()))
def test_what_arrives_is_what_was_asked(change: dict[str, Any], others: dict[str, int]) -> None:
    flat = flatten({"specdec": change, **others})
    assert all(isinstance(value, int | float) for value in flat.values())
    assert nest(flat) == {"specdec": change, **others}


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=3)))
def test_other_requests_pass_untouched(asked: dict[str, Any]) -> None:
    assert flatten(asked) == asked


@pytest.mark.parametrize("change", [8, None, [], {}, "8", {"threshold": "8"}, {"threshold": True}, {"threshold": 2.5}])
def test_what_cannot_be_a_number_is_refused_in_one_line(change: Any) -> None:
    with pytest.raises(ValueError, match=r"^specdec: [^\n]+$"):
        flatten({"specdec": json.loads(json.dumps(change))})
