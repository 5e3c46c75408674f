"""Leads of the pages on operation: control plane, plans, simulation, live page, serving and speech."""

from collections.abc import Mapping
from statistics import fmean, median

from .text import Document, Lead, Leads, listed, span


def control_plane(document: Document) -> Lead:
    times = {name: time["median"] for name, time in document["milliseconds"].items()}
    live = f"{document['live runs']} live runs"
    return (
        f"Operations of the control plane run on a database of {document['runs']:,} runs and "
        f"{document['events']:,} events, in one process on one core.",
        f"Listing the latest runs takes {times['list the latest runs']:.0f} ms, and reconciling {live} takes "
        f"{times[f'reconcile {live}']:.0f} ms (medians).",
    )


def staging(document: Document) -> Lead:
    sizes, seconds = (
        {name: median(values) for name, values in document["measured"][f"pipe, second: {unit}"].items()}
        for unit in ("megabytes", "seconds")
    )
    return (
        "Perilune copies a bundle with an input of "
        f"{document['size of the large input, MB']:.0f} MB to a machine where an earlier run left the same "
        "input, with the present code and with an earlier version.",
        f"The present code transfers {sizes['now']:.2f} MB in {seconds['now']:.1f} s, and the earlier "
        f"version {sizes['before']:.0f} MB in {seconds['before']:.1f} s (medians).",
    )


def follow_latency(document: Document) -> Lead:
    (row,) = document["latency"]
    return (
        "A task on a machine behind `sshd` prints lines, which Perilune copies to the local log.",
        f"A line arrives after {row['median, seconds']:.2f} s (median), and after "
        f"{row['maximum, seconds']:.2f} s at most.",
    )


def live_page(document: Document) -> Lead:
    (watching,), (beside,) = document["watching a run"], document["training beside a page"]
    mean, low, high = (beside[f"slow-down, percent, {bound}"] for bound in ("mean", "low", "high"))
    return (
        "A tiny model trains with GRPO on one core while a browser shows its live page.",
        f"A point appears on the page after {watching['median delay, seconds']:.2f} s (median), and the "
        f"page changes the CPU time of a training step by {mean:+.1f}% (95% interval {low:+.1f}% to "
        f"{high:+.1f}%).",
    )


def plan_accuracy(document: Document) -> Lead:
    rows = document["recipes"]
    time, memory = (max(abs(row[f"error of {figure}, %"]) for row in rows) for figure in ("time", "memory"))
    return (
        f"`--plan` estimated time and memory of {len(rows)} recipes, which then ran on one thread.",
        f"The estimate of a recipe's time was off by at most {time:.0f}%, and that of its peak memory by at "
        f"most {memory:.0f}%.",
    )


def simulation(document: Document) -> Lead:
    errors = {name: fmean(abs(row["error, %"]) for row in document[name]) for name in ("engine", "RL stages")}
    speeds = [row["times as fast as real time"] for row in document["engine"]]
    return (
        "Simulated sampling workloads and RL stages are compared with real runs on one thread.",
        f"The predicted time is off by {errors['engine']:.1f}% for a workload and by "
        f"{errors['RL stages']:.1f}% for an RL stage (means of absolute errors), and a workload is "
        f"simulated {span(speeds, '.1f')} times as fast as it runs.",
    )


def mcp_questions(document: Document) -> Lead:
    rows, answers = document["questions"], document["answers of an agent"]
    by_script, by_agent = (sum(row["right"] in (True, "yes") for row in part) for part in (rows, answers))
    calls = len(document["calls of the agent"])
    return (
        f"A script that knows which tools to call answers {by_script} of {len(rows)} questions about eight "
        "real experiments through the MCP server.",
        f"A language model that knows nothing but the server's own descriptions answers {by_agent} of them, "
        f"with {calls} calls.",
    )


def wiki(document: Document) -> Lead:
    (build,), (lint,) = document["builds"], document["lint"]
    sound = lint["sentences without fault"]
    return (
        f"`perilune wiki` builds pages about {build['runs']:,} runs, and its lint reads "
        f"{lint['planted']} planted faults and {sound} sentences without a fault.",
        f"A build takes {build['CPU seconds from nothing']:.1f} s of CPU time without a cache and "
        f"{build['CPU seconds without a change']:.1f} s if nothing changed, and lint finds "
        f"{lint['found']} of {lint['planted']} faults and reports {lint['of them reported']} of the {sound} "
        "sentences.",
    )


def serve_overhead(document: Document) -> Lead:
    cpu = {name: row["CPU"] for name, row in document["microseconds per token"].items()}
    alone, whole = cpu["engine alone"], cpu["server, whole answers"]
    noise = (
        ", a difference within the noise"
        if max(min(alone), min(whole)) <= min(max(alone), max(whole))
        else ""
    )
    return (
        "The engine alone and `perilune serve` sample 64 answers at a time with a tiny model.",
        f"A token takes {median(alone):.1f} µs of CPU time with the engine alone, {median(whole):.1f} µs "
        f"with the server{noise}, and {median(cpu['server, streamed answers']):.1f} µs if the server streams "
        "(medians).",
    )


def speech(document: Document) -> Lead:
    first, along = (
        _first_audio(document[f"the pipeline alone, in CPU time, text read {when}"])
        for when in ("first", "with the frames")
    )
    few, many = min(first), max(first)
    return (
        f"A small text-to-speech model on one thread speaks {few} to {many} utterances at the same time.",
        f"The first audio takes {first[few]} ms of CPU time with {few} stream and {first[many]} ms with "
        f"{many} streams if the model reads the whole text first, and {along[few]} and {along[many]} ms if "
        "it reads one token of the text with each frame (medians).",
    )


def _first_audio(table: Mapping[str, Document]) -> dict[int, float]:
    return {int(name.split()[0]): row["first audio, ms, p50"] for name, row in table.items()}


def speech_openvino(document: Document) -> Lead:
    table = document["the pipeline alone, in CPU time"]
    factors, audio = (
        listed([_ratio(row, kind) for row in table.values()])
        for kind in ("real-time factor", "first audio, ms")
    )
    counts = listed([name.split()[0] for name in table])
    return (
        "OpenVINO and Perilune's kernels compute the same small text-to-speech model on one thread of a CPU.",
        f"With {counts} streams, OpenVINO's real-time factor is {factors} times that of the kernels, and its "
        f"time to the first audio {audio} times (95% intervals over rounds in brackets).",
    )


def _ratio(row: Document, kind: str) -> str:
    mean, low, high = (row[f"{kind}, OpenVINO / Perilune, {bound}"] for bound in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def speech_voice(document: Document) -> Lead:
    rates: dict[str, list[Document]] = {}
    for row in document["word_error_rates"]:
        rates.setdefault(row["speaker"], []).append(row["word error rate"])
    voice, teacher = ([rate["mean"] for rate in rates[speaker]] for speaker in ("voice", "teacher"))
    (low, high) = min(rate["low"] for rate in rates["voice"]), max(rate["high"] for rate in rates["voice"])
    return (
        "A small text-to-speech model learns to speak digits from utterances of espeak-ng, and a speech "
        "recognizer transcribes the result.",
        f"After {sum(document['cpu_seconds'].values()):.0f} s of training on the CPU, the word error rate "
        f"is {span(voice, '.1%')} with {len(voice)} seeds (95% intervals from {low:.1%} to {high:.1%}), "
        f"compared with {span(teacher, '.1%')} for espeak-ng itself.",
    )


LEADS: Leads = {
    "control_plane": control_plane,
    "follow_latency": follow_latency,
    "live_page": live_page,
    "mcp_questions": mcp_questions,
    "plan_accuracy": plan_accuracy,
    "serve_overhead": serve_overhead,
    "simulation": simulation,
    "speech": speech,
    "speech_openvino": speech_openvino,
    "speech_voice": speech_voice,
    "staging": staging,
    "wiki": wiki,
}
