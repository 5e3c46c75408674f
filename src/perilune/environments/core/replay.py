"""Rebuilds the conversations of a transcript."""

from collections.abc import Mapping
from typing import Any

from perilune.environments.core.protocol import Environment, Message, Task, Transcript


def replay_conversation(environment: Environment, task: Task, transcript: Transcript) -> tuple[Message, ...]:
    """Return the messages that `transcript.player` saw and wrote, up to that player's last action.

    Raises:
        ValueError: if the episode is done before its last action, or the player took no action.
    """
    return replay_agent_conversations(environment, task, transcript)[""]


def replay_agent_conversations(
    environment: Environment, task: Task, transcript: Transcript
) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Return the conversation of `transcript.player` under "", and those of its sub-agents by id.

    Each ends with the agent's last action. Where the context of an agent begins with an action of another
    one, that message has `weight` 0, so that a model learns each action once. Replays all actions but the
    last in this process, so the actions must be trusted.

    Raises:
        ValueError: if the episode is done before its last action, or the player took no action.
    """
    if not transcript.earlier and getattr(environment, "max_turns", 1) == 1:
        return {"": (*task.prompt, _assistant(transcript.text))}
    conversations: dict[str, list[Mapping[str, Any]]] = {}
    session = environment.reset(task, transcript.seed)
    try:
        for index, action in enumerate(transcript.actions):
            observation = session.observation
            if observation.done:
                raise ValueError(f"the episode was done before action {index + 1}")
            (turn, *_) = observation.due
            if observation.player == transcript.player:
                messages = conversations.setdefault(turn.agent, [] if turn.agent else list(task.prompt))
                messages += [*map(_mask_assistant, turn.messages), _assistant(action)]
            if index < len(transcript.earlier):
                session.step(action, transcript.is_finished(index))
    finally:
        session.close()
    if "" not in conversations:
        raise ValueError(f"player {transcript.player} took no action")
    return {agent: tuple(messages) for agent, messages in conversations.items()}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _mask_assistant(message: Message) -> Mapping[str, Any]:
    return {**message, "weight": 0} if message["role"] == "assistant" else message
