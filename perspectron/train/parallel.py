"""Training by several ranks, with torch's FSDP2: each holds a part of the weights, gradients and moments, and reads a
part of each batch, and together they do what one process would.

A block's weights are put together for as long as it computes. A network that other blocks are tied to is a unit of its
own, and the embedding, norm and head are the last. The model is made in parts, since each weight has a stream of
random numbers of its own: no rank ever holds all of it.
"""

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from perspectron.data.loader import Loader
from perspectron.experts.mixture import MATRICES
from perspectron.experts.spread import Spread
from perspectron.experts.stats import experts_of, matrices
from perspectron.model.block import Block
from perspectron.model.ffn import TiedConfig
from perspectron.model.model import LanguageModel, init, shape_of
from perspectron.train import checkpoint, moments, sharded
from perspectron.train.checkpoint import Checkpoint, Progress
from perspectron.train.config import Layout, RunConfig
from perspectron.train.context import split_sequence
from perspectron.train.estimate import Estimate, local_part
from perspectron.train.loop import Trainer
from perspectron.train.metrics import Metrics
from perspectron.train.optim import optimizer_of
from perspectron.train.prepare import training_batches
from perspectron.train.team import Team
from perspectron.train.weights import same_tensors
from perspectron.util import registry
from perspectron.util.config import require
from perspectron.util.errors import NonFiniteError, StorageError
from perspectron.util.files import Record, atomic
from perspectron.util.ranks import Ranks, together


class ParallelTrainer(Trainer):
    """A trainer on one of several ranks. All of them make one, and call the same methods in the same order; rank 0
    alone writes the run's files, but for the shards of checkpoints, of which each writes its own in the background."""

    def __init__(
        self, team: Team, layout: Layout, run: Path, config: RunConfig, *given: Any, **options: Any
    ) -> None:
        """Make a `Trainer` that the ranks share by `layout`."""
        self.team, self.layout, self.first = team, layout, team.rank == 0
        require(not config.train.compile, "compile", True, "left out with more than one rank")
        for name in ("lora", "template"):
            value = getattr(config.train, name)
            require(not value, name, value, "left out with more than one rank")
        kind = config.train.optim.optimizer
        require(
            kind == "adamw", "optimizer", kind, "adamw with more than one rank, as Muon needs whole matrices"
        )
        self.ranks = ranks_of(team, layout, config)
        self._group = dist.new_group(backend="gloo")  # for the thread that writes checkpoints
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None
        with together(self.ranks):
            super().__init__(run, config, *given, **options)

    def batches(self) -> Loader:
        return training_batches(self.config, self.shards, self.ranks.row, self.ranks.rows)

    # ------------------------------------------------------------ making

    def new_model(self) -> LanguageModel:
        """The model's shapes; `wrap` fills each rank's part."""
        return shape_of(self.config.model)

    def wrap(self) -> None:
        mesh, self._columns = mesh_of(self.team, self.layout, self.device.type)
        blocks = cast("list[Block]", self.model.blocks)
        shared = {block.config.ffn.block for block in blocks if isinstance(block.config.ffn, TiedConfig)}
        self._spread_experts()
        if self.ranks.columns > 1:
            split_sequence(self.model, self.ranks)
            if self.teacher is not None:
                split_sequence(self.teacher.model, self.ranks)
        ignored = set(self._experts)
        for index, block in enumerate(blocks):
            if index in shared:
                fully_shard(block.ffn, mesh=mesh, ignored_params=ignored)
            fully_shard(block, mesh=mesh, ignored_params=ignored)
            if any(mixer.learned_start for mixer in block.mixers):
                register_fsdp_forward_method(block, "init_state")
        fully_shard(self.model, mesh=mesh, ignored_params=ignored)
        self.model.to_empty(device=self.device)
        self._draw()
        self.forward: Callable[..., Any] = self.model
        self.optimizer = optimizer_of(self.model, self.config.train.optim)
        for group in list(
            self.optimizer.param_groups
        ):  # fused updates need the tensors of a group on one mesh
            ours = {id(parameter) for parameter in self._experts}
            moved = [p for p in group["params"] if id(p) in ours]
            group["params"] = [p for p in group["params"] if id(p) not in ours]
            if moved:
                self.optimizer.add_param_group({**group, "params": moved})

    def _spread_experts(self) -> None:
        """Leave each rank its part of the experts, to train on its own."""
        self._experts = list[nn.Parameter]()
        n, layers = self.layout.expert_parallel, experts_of(self.model)
        if n == 1:
            return
        require(bool(layers), "expert_parallel", n, f"1: {self.config.model.name} has no experts")
        require(self.team.size % n == 0, "expert_parallel", n, f"a divisor of {self.team.size}, the ranks")
        require(self.ranks.columns == 1, "expert_parallel", n, "1 with context_parallel")
        shape = (self.team.size // n, n)
        self._spread = init_device_mesh(self.device.type, shape, mesh_dim_names=("copy", "expert"))
        for ffn in layers.values():
            E = len(ffn.gate_EFD)
            require(E % n == 0, "expert_parallel", n, f"a divisor of {E}, the experts of a layer")
            for name in MATRICES:
                whole = ffn.get_parameter(name)
                part = whole.new_empty(E // n, *whole.shape[1:])
                shared = DTensor.from_local(part, self._spread, [Replicate(), ShardOf(0)], run_check=False)
                setattr(ffn, name, nn.Parameter(shared, requires_grad=whole.requires_grad))
                self._experts.append(ffn.get_parameter(name))
            ffn.spread = Spread(self._spread.get_group("expert"), n, self._spread.get_local_rank("expert"))

    @torch.no_grad()
    def _draw(self) -> None:
        """Fill the model with the weights of the run's seed, made part by part in the memory of this machine."""
        parts = shape_of(self.config.model)
        held = self.model.state_dict()
        units = [(f"blocks.{index}.", block) for index, block in enumerate(parts.blocks)]
        units += [(f"{name}.", unit) for name, unit in parts.named_children() if name != "blocks"]
        for prefix, unit in units:
            unit.to_empty(device="cpu")
            init(parts, self.config.train.seed)
            for name, tensor in unit.state_dict().items():
                put(held[prefix + name], tensor)
            unit.to_empty(device="meta")

    def settle(self) -> None:
        super().settle()
        self.config = self.team.of_first(lambda: self.config)

    def start(self) -> None:
        self.resume()
        self.config = self.team.of_first(lambda: self.config)  # with one id
        self.best = self.team.of_first(lambda: self.best)  # rank 0 may have set checkpoints aside meanwhile
        self.team.of_first(lambda: checkpoint.save_config(self.run_dir, self.config))

    # ------------------------------------------------------------ training

    def fit(self, *given: Any, **options: Any) -> int | None:
        options["write"] = None  # no rank has the whole model
        with together(self.ranks), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing writes into a block's output
            return super().fit(*given, **options)

    def step(self) -> Metrics:
        with together(self.ranks):
            return super().step()

    def measure(self) -> Metrics:
        with together(self.ranks):
            return super().measure()

    def estimate(self) -> Estimate:
        with together(self.ranks):
            return super().estimate()

    def agreed(self, caught: list[int]) -> int:
        signal = torch.tensor(caught[0] if caught else 0)
        dist.all_reduce(signal, dist.ReduceOp.MAX)
        return int(signal)

    def decided(self, steps: int) -> int:
        decided = torch.tensor(steps)
        dist.broadcast(decided, 0)
        return int(decided)

    def _clip(self) -> float:
        """Bound the norm of all ranks' gradients, and return what it was."""
        for parameter in self._experts:
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=self._spread.get_group("copy"))
                local_part(parameter.grad).div_(self.team.size)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if self.ranks.columns > 1:
            for gradient in gradients.values():
                dist.all_reduce(local_part(gradient), group=self._columns.get_group())
                local_part(gradient).div_(self.ranks.columns)
        squares = [local_part(g).square().sum() / copies(g) for g in gradients.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.device)
        dist.all_reduce(total)
        norm, clip = math.sqrt(total.item()) if total >= 0 else math.nan, self.config.train.optim.clip
        if not math.isfinite(norm):
            here = [name for name, gradient in gradients.items() if not local_part(gradient).isfinite().all()]
            where = [name for names in self.team.gather(here) for name in names]
            first = f"{where[0]} and {len(set(where)) - 1} more" if where else "the sum of squares"
            raise NonFiniteError(f"step {self.progress.step + 1}: gradient is not finite in {first}")
        if clip > 0 and norm + 1e-6 > clip:
            torch._foreach_mul_(
                [local_part(gradient) for gradient in gradients.values()], clip / (norm + 1e-6)
            )
        return norm

    @torch.no_grad()
    def matrices(self) -> dict[str, dict[str, list[float]]]:
        found = dict[str, dict[str, list[float]]]()
        for index, block in enumerate(self.model.blocks):
            if not any(name.endswith("ternary_share_1") for name, _ in block.named_buffers()):
                continue
            units = [module for module in block.modules() if isinstance(module, FSDPModule)]
            for unit in units:
                unit.unshard()
            found |= {f"blocks.{index}.{name}": row for name, row in matrices(block).items()}
            for unit in units:
                unit.reshard()
        return self._of_all_experts(found) if self._experts else found

    def _of_all_experts(self, found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
        """Statistics of the experts of all ranks, from those of each."""
        parts = self.team.gather(found)[: self.layout.expert_parallel]
        return {
            name: {what: [x for part in parts for x in part[name][what]] for what in row}
            for name, row in found.items()
        }

    # ------------------------------------------------------------ checkpoints

    def save(self) -> Path:
        """Begin to write a checkpoint of this step, unless it is there, from a copy of all that is in it."""
        self.saved()
        path, progress, config = (
            checkpoint.path_of(self.run_dir, self.progress.step),
            self.progress,
            self.config,
        )
        there = self.team.of_first(
            lambda: any(c.path == path and c.progress == progress for c in checkpoint.found_in(self.run_dir))
        )
        if there:
            self.team.of_first(lambda: checkpoint.prune(self.run_dir, config.train))
            return path
        state = self.model.state_dict() | moments.training_state(self.model, self.optimizer)
        copied = {name: tensor.detach().clone().cpu() for name, tensor in state.items()}

        def work() -> None:
            try:
                self._write(copied, path, progress, config)
            except BaseException as error:
                self._failed = error

        self._writing = threading.Thread(target=work, daemon=True)
        self._writing.start()
        return path

    def saved(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _write(self, state: dict[str, Any], path: Path, progress: Progress, config: RunConfig) -> None:
        team, group = self.team, self._group
        with contextlib.ExitStack() as stack:

            def begin() -> Path:
                temporary = stack.enter_context(atomic(path))
                temporary.mkdir()
                return temporary

            temporary = team.of_first(lambda: stored(path, begin), group)
            team.agree(lambda: stored(path, lambda: sharded.write(state, temporary, group)), group)
            mine = temporary / sharded.shard_of(team.rank)
            record = team.agree(
                lambda: stored(path, lambda: Record.of(mine) if mine.exists() else None), group
            )
            records = team.gather(record, group)
            files = {sharded.shard_of(rank): one for rank, one in enumerate(records) if one is not None}

            def end() -> None:
                checkpoint.write_index(temporary, config, self.tokenizer, progress, files)
                stack.close()
                checkpoint.prune(self.run_dir, config.train)

            team.of_first(lambda: stored(path, end), group)

    def sweep(self) -> None:
        self.team.of_first(super().sweep)

    def restore(self, newest: Checkpoint) -> None:
        """Read this rank's parts, whoever wrote them."""

        def check() -> dict[str, Tensor]:
            checkpoint.verify(newest, self.team.rank, self.team.size)
            checkpoint.check(newest, self.model, self.tokenizer, True)
            like = sharded.shapes(newest.path)
            weights = {n: tensor for n, tensor in like.items() if not n.startswith(moments.OF_TRAINING)}
            same_tensors(self.model.state_dict(), weights, newest.path)
            return like

        like = self.team.agree(check)
        state, training = dict(self.model.state_dict()), moments.empty(like, self.model)
        state |= training
        self.team.agree(lambda: sharded.fill(state, newest.path, self._group))
        self.team.agree(lambda: moments.restore(newest.path, training, self.model, self.optimizer))

    @torch.no_grad()
    def start_from(self, run: Path) -> None:
        held = self.model.state_dict()
        weights = self.team.agree(lambda: checkpoint.weights_from(run, held, self.tokenizer))
        for name, tensor in weights.items():
            put(held[name], tensor)


def ranks_of(team: Team, layout: Layout, config: RunConfig) -> Ranks:
    """This rank's row and column. ConfigError: numbers do not divide, or context_parallel does not fit the training."""
    C, N, T = layout.context_parallel, team.size, config.train.seq_len
    require(N % C == 0, "context_parallel", C, f"a divisor of {N}, the ranks")
    require(T % C == 0, "context_parallel", C, f"a divisor of seq_len = {T}")
    if C > 1:
        for kind in {mixer.kind for block in config.model.blocks for mixer in block.mixers}:
            splits = registry.part("mixers", kind).splits_time
            require(splits, "context_parallel", C, f"1 for {kind}, whose losses are of whole rows")
        require(not config.train.only, "context_parallel", C, "1 where --only parts of a model learn")
        require(not config.train.recompute, "context_parallel", C, "1 with --recompute")
    row, column = divmod(team.rank, C)
    left = team.rank - 1 if column > 0 else None
    right = team.rank + 1 if column < C - 1 else None
    return Ranks(dist.group.WORLD, N, row, N // C, column, C, left, right)


def mesh_of(team: Team, layout: Layout, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """(the ranks that read the same columns as this one, as FSDP2 takes them, the ranks that read the same rows). Those
    of one window are not at the same layer at the same time, and therefore share no weights: each column has all."""
    C = layout.context_parallel
    N, shards = team.size // C, layout.shards(team.size, team.locals)
    require(N % shards == 0, "shard", layout.shard, f"with as many ranks on each machine as here, {shards}")
    mesh = init_device_mesh(device, (N // shards, shards, C), mesh_dim_names=("copy", "shard", "column"))
    return mesh["shard"] if shards == N else mesh["copy", "shard"], mesh["column"]


def put(place: Tensor, whole: Tensor) -> None:
    """Copy a tensor, or what this rank holds of it, to its place."""
    if isinstance(place, DTensor):
        whole = distribute_tensor(
            whole.to(place.device), place.device_mesh, place.placements, src_data_rank=None
        )
    place.copy_(whole)


def copies(x: Tensor) -> int:
    """The number of ranks that hold the same part of a tensor."""
    if not isinstance(x, DTensor):
        return dist.get_world_size()
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    parts = math.prod(size for placement, size in sizes if not isinstance(placement, Replicate))
    return dist.get_world_size() // parts


def stored(path: Path, work: Callable[[], Any]) -> Any:
    """The result of `work`. StorageError where something cannot be written, by this rank or, as torch tells it, by
    another."""
    try:
        return work()
    except OSError as error:
        raise StorageError(f"{path}: not written ({error.strerror or error})") from error
    except CheckpointException as error:
        rank, (why, _) = next(iter(error.failures.items()))
        raise StorageError(
            f"{path}: not written (rank {rank}: {getattr(why, 'strerror', None) or why})"
        ) from None
