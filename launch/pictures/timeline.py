"""`ringattn timeline`: the activity of every rank in a pass over time, as a Perfetto trace, a picture and a table.

The command runs one attention call on processes of this machine and records it, or reads the recordings of an earlier
run. It compares the recorded times with the simulated times of the same plans. A recording consists of one file
`recording-<rank>.json` for each rank.
Guarantees: the transport is the one that `Ring` would choose, or the one of the option `transport`, and is printed. All
measured times were recorded in one call, after warm-up calls. Predicted times are those of a call that sends the same
messages. Without `cluster`, they are for this machine and the transport that was calibrated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.core.span import COMM, Span
from ringattn.errors import InputError
from ringattn.launch.calls import TORCH_DTYPES, TRANSPORT_NAMES, MaskedCallConfig
from ringattn.launch.folders import writing
from ringattn.launch.measure.environment import cluster_for, own_cluster
from ringattn.launch.options import help_text, option
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.observe.files import write_file
from ringattn.planner.cluster import CLUSTERS, Cluster, cluster_named
from ringattn.planner.simulate import simulate

if TYPE_CHECKING:
    from ringattn.explain import Explanation
    from ringattn.launch.pictures.trace import ByRank, Track
    from ringattn.ring import Ring
    from ringattn.sequence import Sequence

PURPOSE = """\
Traces one attention call on processes of this machine, or reads recordings of other runs, and shows what each rank
did and when: exposed communication, overlap, a trace for ui.perfetto.dev, a picture, and the predicted times.
Examples: ringattn timeline ranks=4 schedule=all_gather
          ringattn timeline recorded=recordings trace= picture=timeline.png"""


@dataclass
class TimelineConfig(MaskedCallConfig):
    """One attention call to record, or the call of existing recordings, and the files to write."""

    ranks: int = option(4, "processes to start", least=1)
    transport: str = option(
        "auto", "transport of the messages; auto: the one that Ring chooses here", choices=TRANSPORT_NAMES
    )
    warmup: int = option(2, "calls before the recorded one", least=0)
    cluster: str = option("", "machines to predict for: a file of ringattn calibrate, or " + ", ".join(CLUSTERS)
                          + "; this machine if not set and calibrated", names=tuple(CLUSTERS))  # fmt: skip
    recorded: str = option(
        "", "folder of recordings to read instead of running a call; the keys then describe the recorded call"
    )
    keep: str = option("", "folder to write the recordings to")
    trace: str = option("timeline.json", "file for the trace; empty for none", writes="file")
    picture: str = option("timeline.png", "file for the picture (PNG); empty for none", writes="picture")
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)

    def check(self) -> None:
        """See `MaskedCallConfig.check`."""
        super().check()
        if self.recorded and self.transport != "auto":
            raise InputError(f"transport={self.transport}: has no effect with recorded=, which starts no ranks")


class Prediction(NamedTuple):
    """The simulated spans, by pass and rank. `cluster` is the name of the predicted machines, empty for no prediction.

    `basis` states the constants of the prediction, or why there is none.
    """

    passes: Many[ByRank]
    cluster: str
    basis: str


def main(argv: Many[str]) -> int:
    """Run the command. Raises `InputError` for bad options and for recordings that cannot be read."""
    if "--help" in argv or "-h" in argv:
        print(help_text("timeline", PURPOSE, TimelineConfig))
        return 0
    from ringattn.launch.config import load  # imports Hydra, which callers of `record_rank` do not need
    from ringattn.launch.pictures.trace import chrome_trace

    config = load(argv, TimelineConfig)
    config.check()
    if config.cluster:
        cluster_named(config.cluster)  # refused before any rank starts
    if config.recorded:
        tracks = read_tracks(Path(config.recorded))
        prediction = prediction_of_recordings(config, tracks)
    else:
        tracks, prediction = recorded_call(config)
    if config.keep:
        with writing("keep", config.keep):
            write_tracks(Path(config.keep), tracks)
        print(f"recordings written: {config.keep}")
    print(table(tracks, prediction.passes))
    print(f"transport: {tracks[0].transport or 'not named in the recordings'}")
    print(f"predicted: {prediction.basis}")
    if config.trace:
        trace = chrome_trace(tracks, prediction.passes, prediction.cluster)
        with writing("trace", config.trace):
            write_file(Path(config.trace), json.dumps(trace))
        print(f"trace written: {config.trace}; open it at ui.perfetto.dev")
    if config.picture:
        from ringattn.launch.pictures.charts import draw_timeline

        with writing("picture", config.picture):
            draw_timeline(config.picture, tracks, prediction.passes, prediction.cluster)
        print(f"picture written: {config.picture}")
    return 0


def recorded_call(config: TimelineConfig) -> tuple[list[Track], Prediction]:
    """Record one call on fresh processes. Return the recordings by rank, and the prediction of the same plans."""
    from ringattn.launch.pictures.trace import Track

    print(f"starting {config.ranks} processes", flush=True)
    answers = run_ranks_in_processes("ringattn.launch.pictures.timeline:worker", asdict(config), config.ranks, None, 1)
    tracks = [Track.from_dict(answer["track"]) for answer in answers]
    passes, cluster, basis = answers[0]["prediction"]
    predicted: list[ByRank] = [[[Span(*span) for span in of_rank] for of_rank in by_rank] for by_rank in passes]
    return tracks, Prediction(predicted, cluster, basis)


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process of the recorded call. Rank 0 also predicts it."""
    import torch

    import ringattn

    torch.set_num_threads(1)
    with ringattn.Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        config = TimelineConfig(**spec)
        track = record_rank(ring, config)
        return {"track": track.as_dict(), "prediction": None if ring.rank else predict(ring, config)}


def predict(ring: Ring, config: TimelineConfig) -> Prediction:
    """Simulate the plans of this ring on the cluster that the option names, or on this machine if it is calibrated."""
    if config.cluster:
        cluster, basis = named_cluster(config.cluster)
    else:
        calibrated, reason = cluster_for(ring)
        if calibrated is None:
            return Prediction([], "", reason)
        cluster, basis = calibrated, f"for this machine, with the constants of its calibration: {calibrated.name}"
    plans = explanation_on(ring, config).plans
    return Prediction([simulate(each, cluster.joined(ring.links)).spans for each in plans], cluster.name, basis)


def named_cluster(name: str) -> tuple[Cluster, str]:
    """Return the cluster that the option names, and a text about the basis of its predictions."""
    cluster = cluster_named(name)
    if cluster.calibrated:
        return cluster, f"with the constants of the calibration: {cluster.name}"
    return cluster, f"with the constants of a preset, which were not measured on this machine: {cluster.name}"


def explanation_on(ring: Ring, config: MaskedCallConfig, machines: Cluster | None = None) -> Explanation:
    """Return the ring's explanation of the call, planned for the cluster `machines`; None for that of the ring."""
    return ring.explain(
        config.sequence_on(ring, config.length), batch=config.batch, q_heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, dtype=TORCH_DTYPES[config.dtype], backward=config.backward,
        schedule=config.schedule, cluster=machines, **config.options(config.length, ring.device),
    )  # fmt: skip


def record_rank(ring: Ring, config: TimelineConfig) -> Track:
    """Record the last of several calls on this rank. Rank 0 prints the progress."""
    import torch

    from ringattn.launch.pictures.trace import Track, clock_offset

    seq: Sequence[Ring] = config.sequence_on(ring, config.length)
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


def prediction_of_recordings(config: TimelineConfig, tracks: Many[Track]) -> Prediction:
    """Simulate the described call next to recordings, if the option `cluster` is set.

    Without it there is no prediction, because recordings do not name their machine.
    """
    if not config.cluster:
        return Prediction([], "", "none: recordings do not name their machine; give cluster= and the keys of the call")
    cluster, basis = named_cluster(config.cluster)
    return Prediction(predicted_spans(config, cluster, tracks), cluster.name, basis)


def predicted_spans(config: TimelineConfig, cluster: Cluster, tracks: Many[Track]) -> list[ByRank]:
    """Return the spans of the simulated passes of the described call.

    Raises `InputError` if the ranks, passes or messages of the recordings differ from those of the described call.
    """
    from ringattn.launch.pictures.trace import check_alike
    from ringattn.testing import run_ranks

    if len(tracks) != config.ranks:
        raise InputError(f"ranks={config.ranks}: {len(tracks)} ranks were recorded; describe the recorded call")
    differences = []
    # A ring that recognises its machines plans for them. Recordings do not state whether this happened, so try the
    # plans for no known machine, for this machine and for the named cluster.
    for machines in (None, *filter(None, (own_cluster(), cluster))):
        explanation = run_ranks(config.ranks, partial(explanation_on, config=config, machines=machines))[0]
        predicted: list[ByRank] = [simulate(plans, cluster).spans for plans in explanation.plans]
        check_alike(tracks, predicted)
        difference = difference_of(tracks, predicted)
        if not difference:
            return predicted
        differences.append(difference)
    raise InputError(
        f"the recorded call differs from the described call: {differences[0]}; give the keys of the recorded call"
    )


def difference_of(tracks: Many[Track], predicted: Many[ByRank]) -> str:
    """Return a text about the first pass in which a rank did not send the predicted messages; empty if none differs."""
    for track in tracks:
        for recorded_pass, by_rank in zip(track.passes, predicted, strict=True):
            recorded, expected = sent_bytes(recorded_pass.spans), sent_bytes(by_rank[track.rank])
            if recorded != expected:
                return (
                    f"in the {recorded_pass.name} pass rank {track.rank} sent {sum(recorded.values()):,} bytes in "
                    f"{len(recorded)} exchanges, not {sum(expected.values()):,} bytes in {len(expected)}"
                )
    return ""


def sent_bytes(spans: Many[Span]) -> dict[str, int]:
    """Return the bytes that each exchange sends, by the name of its step."""
    return {span.name: span.nbytes for span in spans if span.lane == COMM}


def write_tracks(folder: Path, tracks: Many[Track]) -> None:
    """Write one `recording-<rank>.json` per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for track in tracks:
        write_file(folder / f"recording-{track.rank}.json", json.dumps(track.as_dict()))


def read_tracks(folder: Path) -> list[Track]:
    """Return the recordings in `folder`, by rank. Raises `InputError` if there are none or one cannot be read."""
    from ringattn.launch.pictures.trace import Track, check_alike

    files = sorted(folder.glob("recording-*.json"))
    if not files:
        raise InputError(f"recorded={folder}: holds no recording-<rank>.json; `ringattn timeline keep={folder}` "
                         "writes them, and so does `write_tracks` in a program")  # fmt: skip
    tracks = []
    for file in files:
        try:
            tracks.append(Track.from_dict(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file} is not a recording of this version of ringattn: {error!r}") from error
    tracks.sort(key=lambda track: track.rank)
    check_alike(tracks, [])
    return tracks


def table(tracks: Many[Track], predicted: Many[ByRank]) -> str:
    """Return a table by pass and rank: the total, communication and exposed milliseconds, and the overlap."""
    lines = [f"{'pass':<10}{'rank':>5}{'ms':>10}{'in flight':>11}{'exposed':>9}{'overlap':>9}"
             + (f"{'predicted ms':>14}" if predicted else "")]  # fmt: skip
    for number, first in enumerate(tracks[0].passes):
        for track in tracks:
            of_rank = track.passes[number]
            ended_us = max((span.end_us for span in predicted[number][track.rank]), default=0.0) if predicted else 0.0
            lines.append(
                f"{first.name:<10}{track.rank:>5}{(of_rank.end_us - of_rank.start_us) / 1e3:>10.2f}"
                f"{of_rank.comm_us / 1e3:>11.2f}"
                f"{of_rank.exposed_us / 1e3:>9.2f}{of_rank.overlap:>9.1%}"
                + (f"{ended_us / 1e3:>14.2f}" if predicted else "")
            )
    if not all(track.arrivals_known for track in tracks):
        lines.append(
            "in flight and overlap are upper bounds, because this transport does not report when hidden messages "
            "arrive; exposed is measured")  # fmt: skip
    return "\n".join(lines)
