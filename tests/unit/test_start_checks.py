"""What a scheduler process checks once its worker is built: the switch is in it, and the model does not forbid it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang

from specdec.policy import SwitchSettings
from specdec.sglang_plugin import scheduler

pytestmark = pytest.mark.sglang


def test_a_hook_that_did_not_take_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 1. SGLang logs a hook that raises, and goes on with its own worker."""
    monkeypatch.setattr("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(scheduler, "worker_facts", lambda _: SimpleNamespace(worker_class="EAGLEWorkerV2"))
    stock = SimpleNamespace(draft_worker=SimpleNamespace(), server_args=SimpleNamespace(specdec=SwitchSettings(4)))
    with pytest.raises(SystemExit) as ended:
        scheduler._after_init_model_worker(None, stock)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has not taken effect: EAGLEWorkerV2 runs without the switch" in line


@pytest.mark.skipif(version("sglang") != "0.5.23", reason="0.5.12 has no such sharing")
def test_a_draft_that_reuses_an_old_selection_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from specdec.sglang_plugin.sglang_0_5_23.eagle_worker_v2 import refuse_shared_selection

    backend = Path(sglang.__file__).parent / "srt/layers/attention/qwen_sparse_attn_backend.py"
    assert "self._mtp_shared_sparse_indices = state" in backend.read_text()
    refuse_shared_selection(SimpleNamespace())
    refuse_shared_selection(SimpleNamespace(_mtp_shared_sparse_indices=None))
    with pytest.raises(SystemExit):
        refuse_shared_selection(SimpleNamespace(_mtp_shared_sparse_indices=object()))
    assert "index_share_for_mtp_iteration" in capsys.readouterr().err
