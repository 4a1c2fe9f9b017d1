"""The rules against SGLang itself: its own argument handling and its own create_worker.

Runs where a supported release is installed, and holds that release's rules against it. SGLang resolves every
combination on the CPU, for ``--device cuda`` too; nothing is started and no weights are read.
"""

import argparse
import copy
import functools
import inspect
import itertools
import json
import logging
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from specdec import worker_path
from specdec.worker_path import environment, rules_0_5_23, server_flags
from specdec.worker_path.path import RULES
from specdec.worker_path.settings import Settings

try:
    RELEASE = version("sglang")
except PackageNotFoundError:
    RELEASE = "none"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(RELEASE not in RULES, reason=f"needs SGLang {' or '.join(RULES)} installed; found {RELEASE}"),
]

PAIR = Path(__file__).parents[2] / "env" / "tiny_pair"
DRAFT = ["--speculative-draft-model-path", str(PAIR / "draft")]
CHAIN = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
TREE = [
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "16",
]
DP_ATTENTION = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
# Algorithms that the switch does not support and whose many own checks and numbers the rules do not repeat:
# class, file and overlap are compared, where SGLang starts.
ONLY_THE_WORKER = ("UNO", "DSPARK", "DFLASH")


@dataclass(frozen=True)
class Decision:
    """What SGLang or the rules make of a command line; None for all of it when SGLang ends the start."""

    worker_class: str | None
    worker_file: str | None
    overlap: bool
    algorithm: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    max_running_requests: int | None
    adaptive: bool


class SGLang:
    """The installed release's own decision for a command line."""

    def __init__(self) -> None:
        from sglang.srt import server_args
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.server_args_class = server_args.ServerArgs
        self.algorithms = SpeculativeAlgorithm
        self.parser = argparse.ArgumentParser()
        self.server_args_class.add_cli_args(self.parser)
        logging.disable(logging.WARNING)  # SGLang logs a dozen lines per resolution

    def server_args(self, flags: list[str]) -> Any:
        """SGLang's ServerArgs for ``flags``, resolved and checked; raises whatever SGLang raises."""
        args = self.server_args_class.from_cli_args(self.parser.parse_args(flags))
        if RELEASE == "0.5.23":
            args.resolve_once()
        args.check_server_args()
        return args

    def decide(self, flags: list[str], env: dict[str, str]) -> Decision | str:
        """The decision, or the text of the error that ends the start."""
        before = dict(os.environ)  # SGLang writes variables of its own while it resolves
        os.environ.update(env)
        try:
            args = self.server_args(flags)
            return self.decision(args)
        except (ValueError, AssertionError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            os.environ.clear()
            os.environ.update(before)

    def decision(self, args: Any) -> Decision:
        view = RULES[RELEASE].resolved(args)
        algorithm = self.algorithms.from_string(view.speculative_algorithm)
        worker = None if algorithm.is_none() else algorithm.create_worker(args)
        return Decision(
            worker_class=worker.__name__ if worker else None,
            worker_file=source_file(worker) if worker else None,
            overlap=not view.disable_overlap_schedule,
            algorithm=view.speculative_algorithm,
            num_steps=view.speculative_num_steps,
            topk=view.speculative_eagle_topk,
            num_draft_tokens=view.speculative_num_draft_tokens,
            max_running_requests=view.max_running_requests,
            adaptive=view.speculative_adaptive,
        )


def source_file(cls: type) -> str:
    """The class's file relative to site-packages."""
    parts = Path(inspect.getfile(cls)).parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("sglang") :])


@pytest.fixture(scope="module")
def sglang() -> Iterator[SGLang]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
        if RELEASE == "0.5.23":
            import msgspec

            # Half of a resolution's time goes into evaluating the same annotations anew.
            patch.setattr(msgspec.structs, "fields", functools.cache(msgspec.structs.fields))
        for file, name in NOT_IMPORTABLE_HERE[RELEASE].items():
            module = f"sglang.srt.speculative.{file.removesuffix('.py')}"
            patch.setitem(sys.modules, module, module_with_class(file, name))
        yield SGLang()
    logging.disable(logging.NOTSET)


# create_worker imports the worker's file; these cannot be imported on a machine without CUDA's kernels, or,
# the multi-layer one, under a Python below 3.14 (see its test).
NOT_IMPORTABLE_HERE = {
    "0.5.12": {"ngram_worker.py": "NGRAMWorker", "multi_layer_eagle_worker.py": "MultiLayerEagleWorker"},
    "0.5.23": {"ngram_worker.py": "NGRAMWorker"},
}


def module_with_class(file: str, name: str) -> types.ModuleType:
    """Stands in for a worker's module: only the class's name, said to be in the file that really has it."""
    import sglang

    path = Path(sglang.__file__).parent / "srt" / "speculative" / file
    assert re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    module = types.ModuleType(f"sglang.srt.speculative.{path.stem}")
    module.__file__ = str(path)
    exec(f"class {name}: pass", module.__dict__)
    return module


def predicted(flags: list[str], env: dict[str, str]) -> Decision | str:
    """The rules' decision in the same form, or why SGLang ends the start."""
    path = worker_path.predict(flags, env, RELEASE)
    if path.start_error:
        return path.start_error
    return Decision(
        worker_class=path.worker_class,
        worker_file=path.worker_file,
        overlap=path.overlap,
        algorithm=path.algorithm,
        num_steps=path.num_steps,
        topk=path.topk,
        num_draft_tokens=path.num_draft_tokens,
        max_running_requests=path.max_running_requests,
        adaptive=any("adaptive is in force" in reason for reason in path.reasons),
    )


def differences(
    sglang: SGLang, cases: list[tuple[list[str], dict[str, str]]], rules_see: tuple[str, ...] = ()
) -> list[str]:
    """Where the rules and SGLang disagree; ``rules_see`` are flags that only the rules get."""
    found = []
    for flags, env in cases:
        actual, said = sglang.decide(flags, env), predicted([*flags, *rules_see], env)
        if isinstance(actual, str) and (isinstance(said, str) or set(flags) & set(ONLY_THE_WORKER)):
            continue
        if isinstance(actual, Decision) and isinstance(said, Decision) and set(flags) & set(ONLY_THE_WORKER):
            actual = replace(actual, num_steps=None, topk=None, num_draft_tokens=None)
            said = replace(said, num_steps=None, topk=None, num_draft_tokens=None)
        if actual != said:
            shown = [flag for flag in flags if str(PAIR) not in flag]
            found.append(f"{' '.join(shown)} {env}\n  SGLang: {actual}\n  rules:  {said}")
    return found


def test_multi_layer_eagle_without_overlap_cannot_be_imported_in_0_5_12(sglang: SGLang) -> None:
    """Its file names ModelRunner in an annotation and imports it only for type checkers."""
    if RELEASE != "0.5.12" or sys.version_info >= (3, 14):
        pytest.skip("SGLang 0.5.12 under Python below 3.14")
    flags = [*model(), "--speculative-algorithm", "EAGLE3", "--enable-multi-layer-eagle", *TREE]
    assert any("cannot be imported" in warning for warning in worker_path.predict(flags, {}, RELEASE).warnings)
    import sglang.srt.speculative as package

    source = Path(package.__path__[0]) / "multi_layer_eagle_worker.py"
    with pytest.raises(NameError, match="ModelRunner"):
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), {"__name__": "once_more"})


def report(found: list[str]) -> None:
    """Fails with the first differences in full; there can be hundreds."""
    if found:
        pytest.fail(f"{len(found)} differences, such as\n" + "\n".join(found[:3]), pytrace=False)


def model(target: Path = PAIR / "target") -> list[str]:
    return ["--model-path", str(target)]


def with_architecture(folder: Path, source: Path, architecture: str) -> Path:
    """A folder with ``source``'s config.json under another architecture's name."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [architecture]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_option_tables_are_the_release_s_own(sglang: SGLang) -> None:
    """Every option with its aliases, field, number of values, and integers where the rules read integers."""
    own = {tuple(action.option_strings): action for action in sglang.parser._actions if action.dest != "help"}
    ours = server_flags._parser.__wrapped__(RELEASE)  # changed below: not the cached one
    for flag in (server_flags.THRESHOLD_FLAG, server_flags.RESUME_FLAG, server_flags.DWELL_FLAG):
        ours._remove_action(ours._option_string_actions[flag])
    table = {tuple(action.option_strings): action for action in ours._actions}
    own.pop((server_flags.THRESHOLD_FLAG,), None)  # the plugin may have added them to SGLang's parser already
    own.pop((server_flags.RESUME_FLAG,), None)
    own.pop((server_flags.DWELL_FLAG,), None)
    assert table.keys() == own.keys()
    for names, action in own.items():
        assert table[names].dest == action.dest, names
        assert takes_a_value(table[names]) == takes_a_value(action), names
        assert (table[names].type is int) == (action.type is int), names


def takes_a_value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    return {None: "one", "?": "maybe", "+": "several", "*": "several"}[action.nargs]  # type: ignore[index]


def test_settings_have_the_release_s_fields_and_defaults(sglang: SGLang) -> None:
    only_in = {
        "0.5.12": {
            "attn_dp_size",
            "mamba_radix_cache_strategy",
            "cuda_graph_config",
            "cuda_graph_backend_decode",
            "cuda_graph_max_bs_decode",
            "cuda_graph_bs_decode",
            "disable_decode_cuda_graph",
            "enable_return_aux_hidden_states",
            "speculative_use_rejection_sampling",
            "speculative_use_block_verification",
        },
        "0.5.23": {"cuda_graph_max_bs", "cuda_graph_bs", "speculative_skip_dp_mlp_sync"},
    }
    args = sglang.server_args_class(model_path="none")
    ours = vars(Settings())
    missing = {name for name in ours if not hasattr(args, name)}
    assert missing == only_in[RELEASE]
    for name, default in ours.items():
        if name not in missing | {"model_path", "device"}:
            assert getattr(args, name) == default, name


def test_the_speculative_variables_are_those_in_the_release_s_sources(sglang: SGLang) -> None:
    import sglang as package

    names: set[str] = set()
    for file in Path(package.__file__).parent.rglob("*.py"):
        names.update(re.findall(r"SGLANG_[A-Z0-9_]+", file.read_text(encoding="utf-8", errors="replace")))
    found = {name for name in names if environment.looks_speculative(name)}
    assert found == environment.SPECULATIVE_VARIABLES[RELEASE]


DRAFT_PARAMETERS: list[list[str]] = [
    [],
    CHAIN,
    TREE,
    [*CHAIN, "--speculative-num-draft-tokens", "8"],
    ["--speculative-num-steps", "3"],
    ["--speculative-eagle-topk", "4"],
    ["--speculative-num-draft-tokens", "4"],
]
EXTRAS: list[list[str]] = [
    [],
    ["--enable-multi-layer-eagle"],
    DP_ATTENTION,
    ["--speculative-adaptive"],
    ["--speculative-adaptive", "--enable-multi-layer-eagle"],
    ["--speculative-adaptive", *DP_ATTENTION],
    ["--pp-size", "2"],
]
V2_VALUES = {"0.5.12": (None, "0", "1"), "0.5.23": (None, "0")}


@pytest.mark.parametrize(
    ("algorithm", "device"),
    [("EAGLE", "cuda"), ("EAGLE3", "cuda"), ("EAGLE3", "cpu"), ("STANDALONE", "cuda")],
)
def test_the_matrix_of_eagle_s_algorithms(sglang: SGLang, algorithm: str, device: str) -> None:
    report(differences(sglang, matrix(algorithm, device, DRAFT_PARAMETERS)))


@pytest.mark.parametrize("algorithm", ["eagle3", "NEXTN"])
def test_the_matrix_of_other_spellings(sglang: SGLang, algorithm: str) -> None:
    report(differences(sglang, matrix(algorithm, "cuda", [[], CHAIN, TREE])))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("algorithm", [None, "none", "DFLASH", "FROZEN_KV_MTP", "NGRAM", "DSPARK", "UNO", "NOSUCH"])
def test_the_matrix_of_other_algorithms(sglang: SGLang, algorithm: str | None, device: str) -> None:
    report(differences(sglang, matrix(algorithm, device, [[], TREE])))


def matrix(algorithm: str | None, device: str, parameters: list[list[str]]) -> list[tuple[list[str], dict[str, str]]]:
    asked = ["--speculative-algorithm", algorithm] if algorithm else []
    cases = []
    for v2, overlap, numbers, extra in itertools.product(
        V2_VALUES[RELEASE], ([], ["--disable-overlap-schedule"]), parameters, EXTRAS
    ):
        env = {} if v2 is None else {"SGLANG_ENABLE_SPEC_V2": v2}
        draft = [] if algorithm in (None, "UNO") else DRAFT
        cases.append(([*model(), "--device", device, *asked, *draft, *numbers, *extra, *overlap], env))
    return cases


def test_single_steps(sglang: SGLang) -> None:
    """What the matrix does not cross: one case per rule."""
    eagle = ["--speculative-algorithm", "EAGLE3", *DRAFT]
    two_batches = ["--enable-two-batch-overlap", "--moe-a2a-backend", "deepep"]
    multiplexed = ["--enable-pdmux", "--chunked-prefill-size", "-1", "--disable-overlap-schedule"]
    cases: list[tuple[list[str], dict[str, str]]] = [
        ([*eagle, *CHAIN, "--max-running-requests", "100"], {}),
        ([*eagle, *CHAIN], {"SGLANG_ENABLE_SPEC_V2": "maybe"}),
        ([*eagle, *CHAIN], {"SGLANG_ENABLE_SPEC_V2": "No"}),
        ([*eagle, *CHAIN], {"SGLANG_ENABLE_SPEC_V2": ""}),
        ([*eagle, *CHAIN], {"SGLANG_EMBEDDINGS_SPARSE_HEAD": "0"}),
        ([*eagle, *CHAIN, "--enable-dp-attention"], {}),
        ([*eagle, *CHAIN, "--dp-size", "2"], {}),
        ([*eagle, *CHAIN, "--tp-size", "3", "--dp-size", "2", "--enable-dp-attention"], {}),
        ([*eagle, *CHAIN, "--speculative-adaptive", *two_batches], {}),
        ([*eagle, *CHAIN, "--speculative-adaptive", *multiplexed], {}),
        ([*eagle, *TREE, "--page-size", "16", "--attention-backend", "triton"], {}),
        ([*eagle, *TREE, "--page-size", "16", "--attention-backend", "flashinfer"], {}),
        ([*eagle, *TREE, "--page-size", "1", "--attention-backend", "triton"], {}),
        ([*eagle, *CHAIN, "--page-size", "16", "--attention-backend", "triton"], {}),
        ([*eagle, *CHAIN, "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"], {}),
        ([*eagle, *CHAIN, "--enable-mixed-chunk"], {}),
        ([*eagle, "--speculative-adaptive", "--speculative-num-steps", "2"], {}),
        ([*eagle, "--speculative-adaptive", "--speculative-num-steps", "5"], {}),
        (["--speculative-algorithm", "DFLASH"], {}),
        (["--speculative-algorithm", "DFLASH", *DRAFT, "--speculative-dflash-block-size", "8"], {}),
        (["--speculative-algorithm", "DFLASH", *DRAFT, "--speculative-dflash-block-size", "0"], {}),
        (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"], {}),
        (["--speculative-algorithm", "NGRAM", "--page-size", "16", "--attention-backend", "triton"], {}),
    ]
    if RELEASE == "0.5.12":
        cases += [
            ([*eagle, *CHAIN, "--speculative-skip-dp-mlp-sync"], {}),
            (["--speculative-algorithm", "NEXTN", *DRAFT, *CHAIN, "--speculative-skip-dp-mlp-sync"], {}),
        ]
    else:
        pipeline = ["--speculative-algorithm", "EAGLE", *DRAFT, *CHAIN, "--pp-size", "2"]
        cases += [
            ([*eagle, *CHAIN, "--tp-size", "2", "--attn-dp-size", "2"], {}),
            ([*eagle, *CHAIN, "--tp-size", "2", "--attn-dp-size", "2", "--dp-size", "2"], {}),
            ([*eagle, *CHAIN, "--attn-dp-size", "0"], {}),
            (["--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states"], {}),
            ([*eagle, *CHAIN, "--speculative-use-rejection-sampling"], {}),
            ([*eagle, *TREE, "--speculative-use-rejection-sampling"], {}),
            ([*eagle, *CHAIN, "--speculative-use-block-verification"], {}),
            ([*eagle, *TREE, "--speculative-use-block-verification"], {}),
            (["--speculative-algorithm", "NGRAM", "--speculative-use-block-verification"], {}),
            (pipeline, {"SGLANG_ENABLE_PP_SPEC": "1"}),
            ([*pipeline, "--speculative-adaptive"], {"SGLANG_ENABLE_PP_SPEC": "1"}),
            ([*eagle, *CHAIN, "--pp-size", "2"], {"SGLANG_ENABLE_PP_SPEC": "1"}),
            ([*pipeline, "--disaggregation-mode", "prefill"], {}),
            (
                [*eagle, *CHAIN, "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
                {},
            ),
        ]
    cases = [([*model(), "--device", "cuda", *flags], env) for flags, env in cases]
    report(differences(sglang, cases))


@pytest.mark.parametrize(
    "architecture",
    [
        "MiMoV2FlashForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "GigaChat35ForCausalLM",
        "DeepseekV4ForCausalLM",
        "JetNemotronForCausalLM",
        "Grok1ForCausalLM",
        "Qwen3ForCausalLM",
    ],
)
def test_what_the_target_s_architecture_decides(
    sglang: SGLang, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gets the tiny target under another architecture's name, to be spared that one's shapes."""
    if RELEASE == "0.5.12" and architecture == "JetNemotronForCausalLM":
        pytest.skip("SGLang 0.5.12 ends the start of a hybrid model instead")
    from sglang.srt.configs.model_config import ModelConfig

    load = ModelConfig.from_server_args

    def renamed(*args: Any, **kwargs: Any) -> Any:
        config = load(*args, **kwargs)
        if config.model_path == str(PAIR / "target"):
            config.hf_config = copy.copy(config.hf_config)  # SGLang keeps the one it loaded for the next time
            config.hf_config.architectures = [architecture]
        return config

    monkeypatch.setattr(ModelConfig, "from_server_args", renamed)
    target = with_architecture(tmp_path / "target", PAIR / "target", architecture)
    cases: list[tuple[list[str], dict[str, str]]] = []
    for algorithm, numbers, v2 in itertools.product(
        ("EAGLE", "NEXTN", "eagle", "EAGLE3"), ([], CHAIN, TREE), V2_VALUES[RELEASE]
    ):
        env = {} if v2 is None else {"SGLANG_ENABLE_SPEC_V2": v2}
        cases.append(([*model(), "--device", "cuda", "--speculative-algorithm", algorithm, *DRAFT, *numbers], env))
    assert any(isinstance(sglang.decide(*case), Decision) for case in cases), sglang.decide(*cases[0])
    report(differences(sglang, cases, rules_see=("--model-path", str(target))))


@pytest.mark.parametrize("architecture", ["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"])
def test_a_gemma4_draft_moves_eagle_to_frozen_kv_mtp(sglang: SGLang, architecture: str, tmp_path: Path) -> None:
    draft = with_architecture(tmp_path / "draft", PAIR / "draft", architecture)
    cases: list[tuple[list[str], dict[str, str]]] = [
        (
            [
                *model(),
                "--device",
                "cuda",
                "--speculative-algorithm",
                name,
                "--speculative-draft-model-path",
                str(draft),
            ],
            {},
        )
        for name in ("EAGLE", "NEXTN", "EAGLE3")
    ]
    report(differences(sglang, cases))


def test_adaptive_s_config_file_gives_its_steps(sglang: SGLang, tmp_path: Path) -> None:
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [0]}}', encoding="utf-8")
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", str(config)]
    eagle = [*model(), "--device", "cuda", "--speculative-algorithm", "EAGLE3", *DRAFT, *adaptive]
    cases: list[tuple[list[str], dict[str, str]]] = [
        (eagle, {}),
        ([*eagle, *CHAIN], {}),
        ([*eagle, *TREE], {}),
    ]
    report(differences(sglang, cases))
    config.write_text("{}", encoding="utf-8")
    report(differences(sglang, [(eagle, {})]))


def test_the_hybrids_are_the_release_s_own(sglang: SGLang) -> None:
    if RELEASE != "0.5.23":
        pytest.skip(f"SGLang {RELEASE} ends the start of a hybrid model instead")
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs import linear_attn_model_registry as registry

    specs = registry._LINEAR_ATTN_MODEL_REGISTRY
    hybrids = overrides._MAMBA_RADIX_CACHE_ARCHS.union(*(spec.arch_names for spec in specs))
    assert hybrids == {*rules_0_5_23._HYBRIDS, *rules_0_5_23._HYBRIDS_WITHOUT_BUFFER}
    assert hybrids & overrides._MAMBA_EXTRA_BUFFER_ARCHS == set(rules_0_5_23._HYBRIDS)


@pytest.mark.parametrize("flags", [CHAIN, TREE, [*CHAIN, *DP_ATTENTION], [*CHAIN, "--speculative-adaptive"]])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NEXTN"])
def test_refusal_and_overlap_reason_read_sglang_s_own_server_args(
    sglang: SGLang, flags: list[str], algorithm: str
) -> None:
    """The plugin asks with SGLang's resolved ServerArgs; the doctor's prediction says the same."""
    command = [*model(), "--device", "cpu", "--speculative-algorithm", algorithm, *DRAFT, *flags]
    path = worker_path.predict(command, {}, RELEASE)
    if path.start_error:
        pytest.skip(f"SGLang does not start this: {path.start_error}")
    args = sglang.server_args(command)
    reason = worker_path.refusal(args, RELEASE)
    assert (reason is None) == path.switch_acts
    assert reason is None or reason == path.switch_reason
    overlap = worker_path.overlap_reason(args, RELEASE, {})
    assert ("nothing" in overlap) == path.overlap


def test_unresolved_server_args_are_refused(sglang: SGLang) -> None:
    if RELEASE != "0.5.23":
        pytest.skip(f"SGLang {RELEASE} resolves its ServerArgs in their constructor")
    args = sglang.server_args_class.from_cli_args(sglang.parser.parse_args(model()))
    with pytest.raises(ValueError, match=r"resolve_once\(\) first"):
        worker_path.refusal(args, RELEASE)
