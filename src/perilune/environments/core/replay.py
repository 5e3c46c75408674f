"""Rebuilds the conversations of a transcript."""

from __future__ import annotations

from perilune.environments.core.protocol import Environment, Message, Task, Transcript


def conversation(environment: Environment, task: Task, transcript: Transcript) -> tuple[Message, ...]:
    """The messages that `transcript.player` saw and wrote, from the prompt to that player's last action.

    Raises:
        ValueError: if the episode is done before its last action, or the player took no action.
    """
    return agent_conversations(environment, task, transcript)[""]


def agent_conversations(
    environment: Environment, task: Task, transcript: Transcript
) -> dict[str, tuple[Message, ...]]:
    """The conversation of `transcript.player` under "", and those of its sub-agents by id.

    Each ends with the agent's last action. Replays all actions but the last in this process, so the actions
    must be trusted.

    Raises:
        ValueError: if the episode is done before its last action, or the player took no action.
    """
    if not transcript.earlier and getattr(environment, "max_turns", 1) == 1:
        return {"": (*task.prompt, _assistant(transcript.text))}
    found: dict[str, list[Message]] = {}
    session = environment.reset(task, transcript.seed)
    try:
        for index, action in enumerate(transcript.actions):
            seen = session.observation
            if seen.done:
                raise ValueError(f"the episode was done before action {index + 1}")
            (turn, *_) = seen.due
            if seen.player == transcript.player:
                messages = found.setdefault(turn.agent, [] if turn.agent else list(task.prompt))
                messages += [*turn.messages, _assistant(action)]
            if index < len(transcript.earlier):
                session.step(action)
    finally:
        session.close()
    if "" not in found:
        raise ValueError(f"player {transcript.player} took no action")
    return {agent: tuple(messages) for agent, messages in found.items()}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
