"""Leads of the pages on correctness: numerics, checks, rewards, the sandbox, and recovery from failures."""

from statistics import fmean

from .text import Document, Lead, Leads, count, listed


def family_agreement(document: Document) -> Lead:
    families = document["largest difference, nats"]
    rows = families.values()
    errors: dict[bool, list[float]] = {}
    for name, row in families.items():
        found = [row[kind] for kind in row if kind.endswith("against transformers")]
        errors.setdefault(name.startswith(("qwen3_next", "qwen3_5")), []).extend(found)
    ways = max(row["KV cache, against one pass"] for row in rows)
    agree = f"differ by at most {ways:.1e} nats" if ways else "agree in every bit"
    return (
        "Perilune's decoder and transformers compute log-probs of the same random float32 checkpoints, of "
        f"{len(rows)} model families.",
        f"The log-probs differ by at most {max(errors[False]):.1e} nats, or {max(errors[True]):.1e} nats "
        "with linear attention, and Perilune's own two ways to compute them, in one pass and with the KV "
        f"cache, {agree}.",
    )


def weight_precision(document: Document) -> Lead:
    errors: dict[str, list[float]] = {}
    intervals = []
    for row in document["against float32"]:
        errors.setdefault(row["weights"], []).append(row["log-prob error, mean, nats"])
        intervals.append(row["difference of pass@1"])
    worst = [f"{max(values):.4f} nats with {kind}" for kind, values in errors.items()]
    without = sum(interval["low"] <= 0 <= interval["high"] for interval in intervals)
    return (
        "A trained tiny model with weights rounded to bfloat16 or int8 is compared with the same model in "
        "float32.",
        f"The mean error of a token's log-prob is at most {listed(worst)}, and {without} of {len(intervals)} "
        "intervals for the difference of pass@1 contain 0.",
    )


def routing_replay(document: Document) -> Lead:
    kept = {}
    for engine in ("bfloat16", "int8"):
        rows = [
            row
            for row in document["gap between sampler and learner"]
            if row["engine"] == engine and row["updates since sampling"] == 0
        ]
        kept[engine] = fmean(row["KL, with replay"] / row["KL, without replay"] for row in rows)
    tests = [row["conclusion"] for row in document["comparison of pass@1"]]
    claimed = sum(conclusion in ("higher", "lower") for conclusion in tests)
    return (
        "A mixture-of-experts model of 1 million parameters trains with and without routing replay, in which "
        "the learner uses the experts that the sampler chose.",
        "With replay, the KL between sampler and learner is "
        f"{listed([f'{share:.0%} (sampler in {engine})' for engine, share in kept.items()])} of the KL "
        f"without replay, as means over seeds; {claimed} of {len(tests)} comparisons show a difference of "
        "pass@1.",
    )


def checks(document: Document) -> Lead:
    share, runs = document["cost"]["cost as a share of the step"], document["correct_runs"]
    pairs = document["cost"]["seconds per step of each pair of runs"]
    return (
        "The checks that every RL run makes are measured in pairs of runs with and without them, and in "
        "correct runs with many settings.",
        f"The checks take a median of {share['median']:.1%} of a step's CPU time (range "
        f"{share['lowest']:.1%} to {share['highest']:.1%} over {count(len(pairs), 'pair')} of runs), and "
        f"raised {count(document['false_alarms'], 'false alarm')} in {len(runs)} correct runs.",
    )


def schedule(document: Document) -> Lead:
    first, *others = document["runs"]
    differ, kills = sum(row["differences"] for row in others), sum(row["kills"] for row in others)
    same = f"differ in {differ} places" if differ else "are the same byte for byte"
    return (
        "Two runs repeat an asynchronous RL run from its schedule log, one on busy cores and one that is "
        f"killed {count(kills, 'time')}.",
        f"Metrics, episodes, schedule and final weights of {first['steps']} steps {same}, compared with the "
        "first run.",
    )


def reward_audit(document: Document) -> Lead:
    rows = document["families"].values()
    full = sum("full reward for a wrong output" in row["most severe finding"] for row in rows)
    return (
        f"Perilune audited the rewards of {len(rows)} task families of reasoning-gym, as the package ships "
        "them and as a recipe uses them.",
        f"With the package's own scorers, {full} families give the full reward for a wrong output; with the "
        f"rewards that recipes use by default, the audit found no rewarded wrong output in "
        f"{document['grades']['A']['in a recipe']} families (grade A).",
    )


def reward_hacks(document: Document) -> Lead:
    summary = document["summary"]
    return (
        "Perilune's reward audit examined scorers with a planted hack, scorers written after the audit, "
        "sound scorers, and Perilune's built-in rewards.",
        f"The audit named the hack in {summary['planted scorers named']} of {summary['planted scorers']} "
        f"planted scorers, found a flaw in {summary['unseen scorers with grade C or worse']} of "
        f"{summary['unseen scorers']} scorers written after the audit, and gave grade A to "
        f"{summary['sound scorers with grade A']} of {summary['sound scorers']} sound scorers.",
    )


def sandbox(document: Document) -> Lead:
    probes = document["probes"].values()
    contained = sum(probe["all mechanisms"] == "contained" for probe in probes)
    return (
        f"{len(probes)} programs that try to break out (probes) run in the sandbox for code that models "
        "write, with all mechanisms of the sandbox and with one of them switched off.",
        f"With all mechanisms, the sandbox contains {contained} of {len(probes)} probes.",
    )


def soak(document: Document) -> Lead:
    (outcome,) = document["outcome"]
    (pace,) = document["pace"]
    return (
        f"`perilune lab` submitted {outcome['runs accepted']} short runs to a fake cloud in "
        f"{pace['seconds of submission']:.0f} s, with {sum(document['injected faults'].values())} injected "
        "faults.",
        f"There were {count(outcome['lost runs'], 'lost run')}, "
        f"{count(outcome['runs with two results'], 'run')} with two results and "
        f"{count(outcome['leaked machines'], 'leaked machine')}.",
    )


def serve_soak(document: Document) -> Lead:
    verdict = document["verdict"]
    complete = next(row for row in document["requests by outcome"] if row["outcome"] == "complete")
    done = sum(value for value in complete.values() if isinstance(value, int))
    return (
        f"Clients sent {verdict['requests']:,} requests to `perilune serve` while a step of its engine "
        "failed and while the server was killed and started again.",
        f"There were {count(verdict['hung'], 'request')} without an end and "
        f"{count(verdict['unclear outcomes'], 'failure')} without a clear error; {done:,} requests got "
        "complete answers.",
    )


def traces(document: Document) -> Lead:
    bugs, alarms = document["planted bugs"], document["replays without a bug"]
    return (
        f"A regression suite of {document['suite']['cases']} [recorded episodes](../reference/glossary.md) "
        f"was replayed in {len(bugs)} copies of the source, each with one planted bug.",
        f"The suite caught {sum(bug['caught'] for bug in bugs)} of {len(bugs)} bugs, and raised "
        f"{count(alarms['false alarms'], 'false alarm')} in {alarms['harness'] + alarms['rescore']:,} "
        "replays without a bug.",
    )


LEADS: Leads = {
    "checks": checks,
    "family_agreement": family_agreement,
    "reward_audit": reward_audit,
    "reward_hacks": reward_hacks,
    "routing_replay": routing_replay,
    "sandbox": sandbox,
    "schedule": schedule,
    "serve_soak": serve_soak,
    "soak": soak,
    "traces": traces,
    "weight_precision": weight_precision,
}
