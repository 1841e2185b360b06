"""`ringattn timeline`: what every rank did in a pass, and when: a trace for Perfetto, a picture, a line a rank.

Runs one attention call on processes of this machine and records it, or reads what ranks recorded elsewhere with `keep`.
Beside it stands what the simulator predicts for the same plans. A recording is one `recording-<rank>.json` a rank.
Guarantees: what is shown was recorded in one call, after others that nobody recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.errors import InputError
from ringattn.launch.calls import TORCH_DTYPES, MaskedCallConfig
from ringattn.launch.folders import writing
from ringattn.launch.options import help_text, option
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.observe.files import write_file
from ringattn.planner.cluster import CLUSTERS, Cluster, cluster_named
from ringattn.planner.simulate import simulate

if TYPE_CHECKING:
    from ringattn.launch.pictures.trace import ByRank, Track
    from ringattn.ring import Ring

PURPOSE = """\
Traces one attention call on processes of this machine, or reads recordings of other runs, and shows what each rank
did and when: exposed communication, overlap, a trace for ui.perfetto.dev and a picture, predicted times beside.
Examples: ringattn timeline ranks=4 schedule=all_gather cluster=calibrated.json
          ringattn timeline recorded=recordings trace= picture=timeline.png"""


@dataclass
class TimelineConfig(MaskedCallConfig):
    """One recorded call."""

    ranks: int = option(4, "processes to start", least=1)
    warmup: int = option(2, "calls before the recorded one", least=0)
    cluster: str = option("", "predict with these constants: a preset, or a file of ringattn calibrate",
                          names=tuple(CLUSTERS))  # fmt: skip
    recorded: str = option("", "folder of recordings to read instead of running; keys describe their call")
    keep: str = option("", "folder to leave the recordings in")
    trace: str = option("timeline.json", "file for the trace; empty for none", writes="file")
    picture: str = option("timeline.png", "file for the picture (PNG); empty for none", writes="picture")
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options and recordings that cannot be read."""
    if "--help" in argv or "-h" in argv:
        print(help_text("timeline", PURPOSE, TimelineConfig))
        return 0
    from ringattn.launch.config import load  # Hydra, which those who call `record_rank` need not have
    from ringattn.launch.pictures.trace import chrome_trace

    config = load(argv, TimelineConfig)
    config.check()
    cluster = cluster_named(config.cluster) if config.cluster else None
    tracks = read_tracks(Path(config.recorded)) if config.recorded else recorded_tracks(config)
    if config.keep:
        with writing("keep", config.keep):
            write_tracks(Path(config.keep), tracks)
        print(f"recordings kept in {config.keep}")
    predicted = predicted_spans(config, cluster, tracks) if cluster else []
    print(table(tracks, predicted))
    words = cluster.name if cluster else ""
    if config.trace:
        trace = chrome_trace(tracks, predicted, words)
        with writing("trace", config.trace):
            write_file(Path(config.trace), json.dumps(trace))
        print(f"trace written into {config.trace}; open it at ui.perfetto.dev")
    if config.picture:
        from ringattn.launch.pictures.charts import draw_timeline

        with writing("picture", config.picture):
            draw_timeline(config.picture, tracks, predicted, words)
        print(f"drawn into {config.picture}")
    return 0


def recorded_tracks(config: TimelineConfig) -> list[Track]:
    """One call on fresh processes, by rank."""
    from ringattn.launch.pictures.trace import Track

    print(f"starting {config.ranks} processes", flush=True)
    answers = run_ranks_in_processes("ringattn.launch.pictures.timeline:worker", asdict(config), config.ranks, None, 1)
    return [Track.from_dict(answer) for answer in answers]


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """One process of the run."""
    import torch

    import ringattn

    torch.set_num_threads(1)
    with ringattn.Ring(transport="gloo", timeout_s=spec["timeout_s"]) as ring:
        return record_rank(ring, TimelineConfig(**spec)).as_dict()


def record_rank(ring: Ring, config: TimelineConfig) -> Track:
    """This rank's recording of the last call of several; rank 0 prints its progress."""
    import torch

    from ringattn.launch.pictures.trace import Track, clock_offset

    seq = ring.sequence(
        config.length, cu_seqlens=config.cu_seqlens_at(config.length), layout=config.layout,
        for_="dilated" if config.dilated else "causal",
    )  # fmt: skip
    attend: Any = ring.dilated_attention if config.dilated else ring.attention
    generator = torch.Generator().manual_seed(ring.rank)

    def tensor(heads: int) -> torch.Tensor:
        shape = config.batch, seq.counts[ring.rank], heads, config.head_dim
        return torch.randn(shape, generator=generator).to(ring.device, getattr(torch, TORCH_DTYPES[config.dtype]))

    q, k, v = (tensor(n).requires_grad_(config.backward) for n in (config.heads, config.kv_heads, config.kv_heads))
    dout = tensor(config.heads)

    def call(number: int) -> None:
        if ring.rank == 0:
            print(f"call {number + 1} of {config.warmup + 1}", flush=True)
        ring.barrier()
        out = attend(q, k, v, seq, schedule=config.schedule, **config.options(config.length, ring.device))
        if config.backward:
            torch.autograd.grad(out, (q, k, v), dout)

    for number in range(config.warmup):
        call(number)
    with ring.recording() as recording:
        call(config.warmup)
    return Track.of(recording, clock_offset(ring.transport.all_gather_bytes, ring.rank))


def predicted_spans(config: TimelineConfig, cluster: Cluster, tracks: Sequence[Track]) -> list[ByRank]:
    """What the simulator says of the passes. Raises `InputError` where the recordings are of other ranks or passes."""
    from ringattn.launch.pictures.show import ExplainConfig, explanation_of
    from ringattn.launch.pictures.trace import check_alike

    if len(tracks) != config.ranks:
        raise InputError(f"ranks={config.ranks}: {len(tracks)} ranks were recorded; describe the recorded call")
    keys = [described.name for described in fields(MaskedCallConfig)]
    explanation = explanation_of(ExplainConfig(ranks=config.ranks, **{key: getattr(config, key) for key in keys}))
    predicted: list[ByRank] = [simulate(plans, cluster).spans for plans in explanation.plans]
    check_alike(tracks, predicted)
    return predicted


def write_tracks(folder: Path, tracks: Sequence[Track]) -> None:
    """Leave one `recording-<rank>.json` a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for track in tracks:
        write_file(folder / f"recording-{track.rank}.json", json.dumps(track.as_dict()))


def read_tracks(folder: Path) -> list[Track]:
    """The recordings in `folder`, by rank. Raises `InputError` where there are none, or files that are none."""
    from ringattn.launch.pictures.trace import Track, check_alike

    files = sorted(folder.glob("recording-*.json"))
    if not files:
        raise InputError(f"recorded={folder}: holds no recording-<rank>.json; `ringattn timeline keep={folder}` "
                         "leaves them, and so does `write_tracks` in a program of your own")  # fmt: skip
    tracks = []
    for file in files:
        try:
            tracks.append(Track.from_dict(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file} is not a recording of this version of ringattn: {error!r}") from error
    tracks.sort(key=lambda track: track.rank)
    check_alike(tracks, [])
    return tracks


def table(tracks: Sequence[Track], predicted: Sequence[ByRank]) -> str:
    """A line for each pass and rank: milliseconds in all, under way, exposed, and what was hidden."""
    lines = [f"{'pass':<10}{'rank':>5}{'ms':>10}{'under way':>11}{'exposed':>9}{'overlap':>9}"
             + (f"{'predicted ms':>14}" if predicted else "")]  # fmt: skip
    for number, first in enumerate(tracks[0].passes):
        for track in tracks:
            one = track.passes[number]
            ended_us = max((span.end_us for span in predicted[number][track.rank]), default=0.0) if predicted else 0.0
            lines.append(
                f"{first.name:<10}{track.rank:>5}{(one.end_us - one.start_us) / 1e3:>10.2f}{one.comm_us / 1e3:>11.2f}"
                f"{one.exposed_us / 1e3:>9.2f}{one.overlap:>9.1%}" + (f"{ended_us / 1e3:>14.2f}" if predicted else "")
            )
    if not all(track.arrivals_known for track in tracks):
        lines.append("under way and overlap are upper bounds: this transport does not tell when a message arrived that "
                     "work hid; exposed is measured")  # fmt: skip
    return "\n".join(lines)
