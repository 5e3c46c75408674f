"""A transcript as the conversation it was."""

from __future__ import annotations

from perilune.environments.core.protocol import Environment, Message, Task, Transcript


def conversation(environment: Environment, task: Task, transcript: Transcript) -> tuple[Message, ...]:
    """The messages as `transcript.player` saw and wrote them, from the prompt to that player's last action.

    All actions but the last are played again, here and now: not for actions that are not trusted.

    Raises:
        ValueError: when the episode is done before its last action, or the player has none.
    """
    if not transcript.earlier and getattr(environment, "max_turns", 1) == 1:
        return (*task.prompt, _said(transcript.text))
    messages: list[Message] = list(task.prompt)
    end = 0
    session = environment.reset(task, transcript.seed)
    try:
        for place, action in enumerate(transcript.actions):
            found = session.observation
            if found.done:
                raise ValueError(f"the episode was done before action {place + 1}")
            if found.player == transcript.player:
                messages += [*found.messages, _said(action)]
                end = len(messages)
            if place < len(transcript.earlier):
                session.step(action)
    finally:
        session.close()
    if not end:
        raise ValueError(f"player {transcript.player} takes no action")
    return tuple(messages[:end])


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}
