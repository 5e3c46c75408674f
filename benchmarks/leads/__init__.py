"""The two sentences that open each result page, computed from its JSON, and the questions of the index."""

from collections.abc import Mapping

from . import agents, learning, operation, speed, trust
from .text import Leads

LEADS: Leads = {**speed.LEADS, **learning.LEADS, **agents.LEADS, **trust.LEADS, **operation.LEADS}
QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "How fast is Perilune, compared with other software?": (
        *("real_model", "grpo_step_vs_trl", "engine_vs_generate", "rollout", "openvino", "vllm_server"),
        "matrix_products",
    ),
    "How fast is it on a GPU?": ("grpo_cuda", "rollout_cuda", "passes_cuda", "smollm2_cuda"),
    "What makes sampling and training faster?": (
        *("speculation", "prefix_cache", "asynchronous", "pacing", "weight_sync", "processes"),
    ),
    "What do models learn, and from how much training?": (
        *("quickstart", "smollm2", "flywheel", "distillation", "system_prompt", "preference_learning"),
    ),
    "Which algorithms and settings work best?": (
        *("algorithms", "algorithms_smollm2", "staleness", "curriculum", "process_rewards"),
    ),
    "How do agents learn to use tools, long contexts and sub-agents?": (
        *("agent_program", "search_as_code", "recursion", "contexts", "swarm"),
    ),
    "How well do models learn games?": ("connect_four", "selfplay", "game_teachers"),
    "Are the computations right?": ("family_agreement", "weight_precision", "routing_replay", "checks"),
    "Can a model cheat?": ("reward_audit", "reward_hacks", "overoptimisation", "sandbox"),
    "What happens after failures?": ("soak", "serve_soak", "schedule", "traces"),
    "How well does Perilune predict a run?": ("plan_accuracy", "simulation"),
    "What do control, observation and serving cost?": (
        *("control_plane", "staging", "follow_latency", "live_page", "environments", "serve_overhead"),
    ),
    "How do coding agents and readers query runs?": ("mcp_questions", "wiki"),
    "How fast and how good is speech?": ("speech", "speech_openvino", "speech_voice"),
}
