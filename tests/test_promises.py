"""What users of Accelerate and of the Transformers Trainer are promised: one row each, with the tests that show it.

A row names its tests as "file::function", without `tests/test_`. What no other file shows is shown here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acclight import TrainModule
from acclight.strategies import DDPStrategy, DeepSpeedStrategy, FSDP2Strategy
from tests.distributed import ROOT, RankChecks, run_command, run_ranks
from tests.scenarios import Scalar, quiet_trainer

on_two_ranks = RankChecks(world_size=2, timeout=120.0)


@dataclass(frozen=True)
class Promise:
    """A row.

    Attributes:
        row: Its short name; the letter is its chapter.
        tests: Those that show it.
        needs: What cannot be run here, and why; `tests` then show the way of the arguments down to what would run.
    """

    row: str
    tests: tuple[str, ...]
    needs: str = ""


PROMISES = [
    # A: two ways to configure, one surface
    Promise(
        "A-launch",
        ("example_llama::test_launched_runs_agree", "strategies::test_the_scripts_precision_wins_and_the_ranks_share_a_folder",
         "two_machines::test_two_machines_give_the_losses_of_one_process", "promises::test_every_key_of_a_launch_file_arrives"),
    ),
    Promise(
        "A-startup-summary",
        ("startup::test_a_plain_start", "startup::test_arguments_are_named_as_such",
         "startup::test_a_file_and_the_launcher_are_named", "startup::test_two_ranks", "startup::test_under_accelerate_launch"),
    ),
    Promise(
        "A-yaml-keys",
        ("promises::test_every_key_of_a_launch_file_arrives", "strategies::test_fields_from_a_dict_or_a_file",
         "fsdp2::test_a_spelling_that_only_the_launcher_reads_is_warned_of"),
    ),
    Promise("A-in-code", ("strategies::test_fields_from_a_dict_or_a_file",)),
    Promise(
        "A-launch-and-code-disagree",
        ("strategies::test_conflicts_name_both_sides", "strategies::test_the_launcher_completes_a_scripts_strategy",
         "parallelism::test_the_launcher_is_followed_and_the_script_wins",
         "strategy_fields::test_the_scripts_accumulation_wins_over_the_launchers_with_a_line",
         "strategy_fields::test_a_scripts_ds_config_wins_over_the_launchers_fields_with_a_line"),
    ),
    Promise(
        "A-model-after-configuration",
        ("strategies::test_zero_init_leaves_nothing_behind", "precision::test_the_model_is_born_in_the_type_of_true_precision",
         "promises::test_a_model_born_sharded_is_never_whole_on_one_rank"),
    ),
    Promise(
        "A-accelerator-config",
        ("accelerator_config::test_every_form_is_read", "accelerator_config::test_what_cannot_be_is_named",
         "accelerator_config::test_it_reaches_accelerate",
         "accelerator_config::test_the_order_follows_data_seed_or_torchs_seed_or_the_global_generator",
         "accelerator_config::test_even_batches_fill_up_training_and_never_evaluation",
         "accelerator_config::test_a_stream_is_dispatched_where_that_is_asked_for",
         "accelerator_config::test_dispatched_batches_are_those_that_each_rank_would_read"),
    ),
    Promise("A-split-batches", ("accelerator_config::test_split_batches_makes_the_batch_size_that_of_all_ranks",)),
    Promise("A-non-blocking", ("accelerator_config::test_non_blocking_reaches_the_copy_and_wants_pinned_memory",)),
    Promise("A-use-configured-state", ("accelerator_config::test_a_state_that_is_there_already_is_used",)),
    Promise(
        "A-accumulation-given-twice",
        ("accelerator_config::test_accumulation_is_given_once",
         "accelerator_config::test_gradients_may_be_averaged_after_every_batch"),
    ),
    Promise(
        "A-accelerate-version",
        ("fsdp2::test_an_accelerate_that_is_missing_or_too_old_is_named",
         "fsdp2::test_newer_versions_are_taken_and_the_floor_is_the_projects"),
    ),
    # B: FSDP2
    Promise(
        "B-fields",
        ("promises::test_fsdp2s_fields_change_what_they_name", "promises::test_offload_and_checkpointing_reach_accelerate",
         "strategies::test_fsdp2_wraps_what_it_is_told_and_trains_the_same",
         "strategies::test_ignored_modules_stay_whole_and_must_be_frozen",
         "strategies::test_weights_that_rank_0_alone_has_are_sharded_with_ties_and_buffers",
         "precision::test_the_users_own_policy_decides_what_fsdp2_casts"),
        needs="cpu_offload moves shards only where there is a GPU to move them from",
    ),
    Promise(
        "B-auto-wrap-policy",
        ("strategies::test_units_by_class_and_by_size", "fsdp2::test_class_names_are_case_sensitive",
         "strategies::test_fsdp2_wraps_what_it_is_told_and_trains_the_same", "strategies::test_wrong_arguments_are_named"),
    ),
    Promise(
        "B-state-dict-type",
        ("fsdp2::test_state_dict_type_decides_the_exported_files", "fsdp2::test_a_sharded_export_loads_in_transformers"),
    ),
    Promise("B-version-1", ("strategies::test_conflicts_name_both_sides", "strategies::test_fields_from_a_dict_or_a_file")),
    Promise(
        "B-xla",
        ("fsdp2::test_xla_needs_its_package_and_says_so", "fsdp2::test_xla_settings_reach_its_wrapper"),
        needs="a TPU and torch_xla; training there is refused, because torch_xla replaces the optimizer's parameters",
    ),
    Promise("B-activation-checkpointing-twice", ("strategies::test_activation_checkpointing_is_asked_for_once",)),
    Promise("B-weights-only", ("fsdp2::test_weights_alone_are_saved_sharded_and_the_best_is_loaded_at_the_end",)),
    Promise(
        "B-parallelism",
        ("parallelism::test_hybrid_sharding_is_placed_by_the_mesh_and_trains_the_same",
         "parallelism::test_what_cannot_be_raises_with_the_numbers",
         "parallelism::test_ranks_of_one_context_group_read_the_same_batch",
         "parallelism::test_a_tensor_parallel_model_is_made_and_accelerate_cannot_prepare_it_still"),
        needs="tensor parallelism: an Accelerate that fits transformers 5.24; context parallelism: attention kernels of GPUs",
    ),
    # C: DeepSpeed
    Promise(
        "C-stages-and-auto",
        ("strategies_on_cpu::test_what_is_asked_for_really_wraps_the_model", "promises::test_auto_is_filled_from_the_trainer",
         "strategies::test_a_window_that_contradicts_the_ds_config", "strategies::test_wrong_arguments_are_named",
         "precision::test_what_a_ds_config_and_the_trainer_say_must_agree",
         "strategy_fields::test_a_ds_config_that_contradicts_or_does_nothing",
         "strategy_fields::test_auto_goes_by_the_models_width_or_is_deepspeeds_default"),
    ),
    Promise(
        "C-offload",
        ("strategies::test_offload_to_the_cpu_trains_and_resumes_the_same", "strategies::test_zero_init_leaves_nothing_behind",
         "promises::test_offload_and_saving_reach_deepspeed"),
        needs="NVMe: libaio and a device",
    ),
    Promise("C-clipping-off", ("fit_loop::test_clipping_off_is_off",)),
    Promise(
        "C-hooks-and-numbers",
        ("hooks::test_the_order_on_two_ranks", "fit_loop::test_clipping_by_the_whole_norm_on_two_ranks",
         "fit_loop::test_the_scheduler_steps_once_per_step_on_two_ranks"),
    ),
    Promise("C-more-than-one-optimizer", ("manual_optimization::test_deepspeed_refuses_two_optimizers_before_training",)),
    Promise(
        "C-batch-size-finding",
        ("batch_size_finder::test_zero_3_is_refused_with_what_can",
         "batch_size_finder::test_nothing_is_left_of_the_search_on_two_ranks"),
    ),
    Promise("C-switch-from-ddp", ("equivalence::test_two_processes",)),
    # D: DDP
    Promise(
        "D-backend",
        ("strategies::test_a_backend_that_is_not_there_and_a_hook_that_is_not_known",),
        needs="nccl, mpi, xccl, hccl, cncl and mccl: their devices",
    ),
    Promise(
        "D-fields",
        ("strategies::test_ddps_fields_are_seen_on_the_wrapped_model", "strategies::test_communication_hooks",
         "strategies::test_unused_parameters_are_named", "promises::test_ddps_hooks_and_timeout_reach_accelerate"),
        needs="the bf16 hook: NCCL",
    ),
    # E: the loop
    Promise(
        "E-prepare-precision-backward",
        ("precision::test_two_processes", "precision::test_an_overflow_on_one_rank_skips_the_step_on_all",
         "gradient_paths::test_gradients_are_averaged", "precision::test_names_of_precisions"),
        needs="fp8: a GPU of 8.9 or newer and a package with recipes",
    ),
    Promise(
        "E-accumulation",
        ("equivalence::test_two_processes", "fit_loop::test_the_last_short_window_on_two_ranks",
         "fit_loop::test_tokens_weigh_the_same_over_ranks",
         "fit_loop::test_ranks_with_different_numbers_of_batches_stop_together"),
    ),
    Promise("E-scheduler", ("fit_loop::test_the_scheduler_steps_once_per_step_on_two_ranks",)),
    Promise(
        "E-main-process-only",
        ("callbacks_progress::test_only_rank_0_of_two_prints", "promises::test_prints_lines_and_warnings_come_once"),
    ),
    Promise(
        "E-trackers",
        ("trackers::test_names_and_loggers_in_one_list", "trackers::test_one_that_is_not_installed_is_told_before_training",
         "trackers::test_a_run_from_start_to_end", "trackers::test_mlflow", "trackers::test_trackio", "trackers::test_wandb",
         "loggers::test_tensorboard_scalars_at_the_optimizer_step"),
        needs="accounts: with the packages installed, W&B, Comet and ClearML are tried in their offline modes",
    ),
    Promise(
        "E-checkpoints",
        ("checkpoint_distributed::test_saved_on_several_loads_on_one",
         "checkpoint_distributed::test_fsdp2_training_goes_on_bit_for_bit",
         "data_resume::test_from_two_ranks_to_one_no_sample_is_repeated_or_left_out"),
    ),
    Promise("E-notebook-launcher", ("promises::test_the_notebook_launcher",)),
    Promise("E-tied-weights", ("strategies::test_a_tie_on_two_ranks",)),
    Promise("E-compile", ("compile::test_compiled_training_is_the_same_on_two_ranks", "compile::test_regions")),
]  # fmt: skip


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """What pytest collects of the files that the rows name, as "file::function"."""
    files = sorted({f"tests/test_{test.partition('::')[0]}.py" for promise in PROMISES for test in promise.tests})
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    done = run_command([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, timeout=240.0)
    assert done.returncode == 0, done.stdout
    found = [line.partition("[")[0] for line in done.stdout.splitlines() if line.startswith("tests/")]
    return {line.removeprefix("tests/test_").replace(".py", "", 1) for line in found}


def test_rows_have_names_of_their_own() -> None:
    names = [promise.row for promise in PROMISES]
    assert len(set(names)) == len(names)
    assert all(promise.tests for promise in PROMISES)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.row)
def test_promise(promise: Promise, collected: set[str]) -> None:
    assert set(promise.tests) <= collected, sorted(set(promise.tests) - collected)


# --- A: configuration -----------------------------------------------------------------------------------------------------


SHOW = """
import json, sys
from acclight import Trainer
trainer = Trainer(logger=False, enable_progress_bar=False)
strategy = trainer.strategy
names = sys.argv[2:]
shown = {name: getattr(strategy, name) for name in names} | {
    "name": strategy.name, "world": trainer.world_size, "precision": trainer.core.precision, "clip": trainer.gradient_clip_val,
}
if strategy.kind == "deepspeed":
    shown["zero"] = strategy.config["zero_optimization"]
if trainer.is_global_zero:
    open(sys.argv[1], "w").write(json.dumps(shown))
"""

FSDP_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: bf16
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Layer,Other
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: FULL_STATE_DICT
"""

SIZE_FILE = FSDP_FILE.replace("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP\n  fsdp_min_num_params: 1234")

DEEPSPEED_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
mixed_precision: bf16
main_process_port: 0
deepspeed_config:
  zero_stage: 3
  gradient_clipping: 0.25
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
"""

FSDP_FIELDS = {
    "reshard_after_forward": False, "cpu_offload": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_cls_names_to_wrap": ["Layer", "Other"], "cpu_ram_efficient_loading": True, "activation_checkpointing": True,
    "state_dict_type": "FULL_STATE_DICT",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fields", "others"),
    [
        (FSDP_FILE, FSDP_FIELDS, {"name": "fsdp2", "clip": None}),
        (SIZE_FILE, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1234}, {"name": "fsdp2", "clip": None}),
        (DEEPSPEED_FILE, {"stage": 3, "zero3_init_flag": True}, {
            "name": "deepspeed_stage_3", "clip": 0.25, "zero": {
                "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }),
    ],
    ids=["fsdp", "by_size", "deepspeed"],
)  # fmt: skip
def test_every_key_of_a_launch_file_arrives(
    text: str, fields: dict[str, Any], others: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "launch.yaml").write_text(text)
    accelerate = Path(sys.executable).parent / "accelerate"
    command = [accelerate, "launch", "--config_file", "launch.yaml", "show.py", "shown.json", *fields]
    done = run_command(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown == fields | others | {"world": 2, "precision": "bf16-mixed"}


def growth_of_memory() -> list[float]:
    """MiB by which this rank's peak grows while a model of 16 layers of 4 MiB comes into being, sharded and then whole."""

    class Born(TrainModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def configure_model(self) -> None:
            self.layers = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(16)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            raise StopIteration  # the model is there, and nothing else has been allocated

    peaks = []
    # The first one pays for what is imported and allocated once.
    for width, sharded in ((8, True), (1024, True), (1024, False)):
        trainer = quiet_trainer(strategy=DeepSpeedStrategy(stage=3, zero3_init_flag=sharded), max_steps=1)
        with pytest.raises(StopIteration):
            trainer.fit(Born(width), DataLoader(torch.ones(2, width), batch_size=1))
        # This program's own; what getrusage says is that of the process that has started it, too.
        (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
        peaks.append(int(line.split()[1]) / 1024)
    return [peak - peaks[0] for peak in peaks[1:]]


def test_a_model_born_sharded_is_never_whole_on_one_rank() -> None:
    """On three ranks, each of which holds a third of its 64 MiB."""
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed is given back, and holes in the heap do not count
    grown = run_ranks(growth_of_memory, world_size=3, env=at_once, timeout=240.0)
    assert all(20 < sharded < 45 for sharded, _ in grown), grown  # a third, and the layers at work
    assert all(whole > 62 for _, whole in grown), grown  # the measure sees a whole model


# --- B: FSDP2 -------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Layer.runs += 1  # FSDP2 makes a class of its own of it
        return torch.tanh(self.linear(x))


class Stack(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_two_ranks
def test_fsdp2s_fields_change_what_they_name() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    def run(**fields: Any) -> tuple[int, int, set[torch.dtype]]:
        """Gathers and layer forwards of one step, and the types in which parameters are gathered."""
        Layer.runs = 0
        types: set[torch.dtype] = set()
        module = Stack()
        for layer in module.layers:
            layer.linear.register_forward_pre_hook(lambda linear, _: types.add(linear.weight.dtype))
        strategy = FSDP2Strategy(transformer_cls_names_to_wrap="Layer", **fields)
        trainer = quiet_trainer(strategy=strategy, max_steps=1)
        with CommDebugMode() as counted:
            trainer.fit(module, DataLoader(torch.ones(2, 4), batch_size=1))
        counts = {str(name): number for name, number in counted.get_comm_counts().items()}
        return sum(n for name, n in counts.items() if "_allgather_base_" in name), Layer.runs, types

    # Each of three layers once for the forward and once for the backward.
    assert run() == (6, 3, {torch.float32})
    assert run(reshard_after_forward=False) == (3, 3, {torch.float32})
    gathers, runs, _ = run(activation_checkpointing=True)
    assert (gathers, runs) == (6, 6), "each layer runs once more in the backward, in the gather that is there for it"
    types = run(mixed_precision_policy="bf16")[2]
    assert types == {torch.bfloat16}


def test_offload_and_checkpointing_reach_accelerate() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    strategy = FSDP2Strategy(cpu_offload=True, activation_checkpointing=True, activation_checkpointing_offload=True)
    plugin = strategy.accelerator_arguments(clip=0.0, micro_batch_size=1)["fsdp_plugin"]
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert (plugin.activation_checkpointing, plugin.activation_checkpointing_offload) == (True, True)
    unsaid = FSDP2Strategy().accelerator_arguments(clip=0.0, micro_batch_size=1)["fsdp_plugin"]
    assert not isinstance(unsaid.cpu_offload, CPUOffloadPolicy)


# --- C: DeepSpeed ---------------------------------------------------------------------------------------------------------


@on_two_ranks
def test_auto_is_filled_from_the_trainer() -> None:
    config = {
        "zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"},
    }  # fmt: skip
    trainer = quiet_trainer(
        strategy=DeepSpeedStrategy(ds_config=config), gradient_clip_val=0.5, accumulate_grad_batches=2, precision="bf16-mixed",
        max_steps=1,
    )  # fmt: skip
    trainer.fit(Stack(), DataLoader(torch.ones(8, 4), batch_size=2))
    filled = trainer.strategy.config
    assert (trainer.strategy.stage, filled["gradient_clipping"], filled["bf16"]["enabled"]) == (2, 0.5, True)
    assert "auto" not in json.dumps(filled)
    assert trainer.global_step == 1


def test_offload_and_saving_reach_deepspeed() -> None:
    fields = {
        "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/fast", "offload_param_device": "nvme",
        "offload_param_nvme_path": "/fast", "zero3_save_16bit_model": True, "zero3_init_flag": True,
    }  # fmt: skip
    strategy = DeepSpeedStrategy(stage=3, **fields)
    nvme = {"device": "nvme", "nvme_path": "/fast"}
    assert strategy._zero_section == {
        "stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    assert strategy.zero3_init_flag


# --- D: DDP ---------------------------------------------------------------------------------------------------------------


def test_ddps_hooks_and_timeout_reach_accelerate() -> None:
    strategy = DDPStrategy(comm_hook="power_sgd", comm_wrapper="bf16", static_graph=True, timeout=60)
    (handler,) = strategy.accelerator_arguments(clip=0.0, micro_batch_size=1)["kwargs_handlers"]
    assert (handler.comm_hook.value, handler.comm_wrapper.value, handler.static_graph) == ("power_sgd", "bf16", True)
    assert strategy.timeout.total_seconds() == 60
    assert DDPStrategy().timeout.total_seconds() == 1800
    assert DDPStrategy(comm_hook="bf16")._communication["comm_hook"].value == "bf16"


# --- E: the loop ----------------------------------------------------------------------------------------------------------


def saying() -> None:
    import warnings

    from acclight.messages import warn

    class Talking(Scalar):
        def on_train_start(self) -> None:
            self.print("printed")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        quiet_trainer(strategy="ddp", max_steps=1).fit(Talking(), DataLoader(torch.ones(2), batch_size=1))
        warn("warned of")


def test_prints_lines_and_warnings_come_once(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("from tests.test_promises import saying\nsaying()\n")
    outputs = run_ranks(script, world_size=2, env={"PYTHONPATH": str(ROOT)})
    for text in ("printed\n", "fit: strategy ddp", "UserWarning: warned of"):
        assert [output.count(text) for output in outputs] == [1, 0], text


NOTEBOOK = """
import sys
import torch
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader
from tests.scenarios import Scalar, quiet_trainer

def train(folder):
    module = Scalar(lr=1.0)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(module, DataLoader(torch.tensor([1.0, 3.0]), batch_size=1))
    open(f"{folder}/{trainer.strategy.name}-{trainer.global_rank}-of-{trainer.world_size}-{module.w.item()}", "w").close()

if __name__ == "__main__":
    if "early" in sys.argv:
        Accelerator(cpu=True)
    else:
        quiet_trainer(max_steps=1).fit(Scalar(), DataLoader(torch.ones(2), batch_size=1))  # an earlier cell
    notebook_launcher(train, (sys.argv[1],), num_processes=int(sys.argv[2]), use_port=sys.argv[3])
"""


@pytest.mark.parametrize(
    ("processes", "files"),
    [(1, ["single-0-of-1-1.0"]), (2, ["ddp-0-of-2-2.0", "ddp-1-of-2-2.0"]), (0, [])],
    ids=["one", "two", "after_an_accelerator"],
)
def test_the_notebook_launcher(processes: int, files: list[str], tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    out = tmp_path / "out"
    out.mkdir()
    arguments = [out, processes or 2, port, *([] if processes else ["early"])]
    command = [sys.executable, tmp_path / "notebook.py", *map(str, arguments)]
    done = run_command(command, env={"PYTHONPATH": str(ROOT)})
    assert sorted(path.name for path in out.iterdir()) == files, done.stdout
    if processes:
        assert done.returncode == 0, done.stdout
    else:
        assert "the `Accelerator` should only be initialized inside your training function" in done.stdout
