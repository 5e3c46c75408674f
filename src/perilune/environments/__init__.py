"""Environments: the protocol, built-in environments, and adapters to other packages."""

from perilune.environments.core.agents import AgentProgram as AgentProgram
from perilune.environments.core.agents import Programs as Programs
from perilune.environments.core.agents import gather as gather
from perilune.environments.core.agents import sample as sample
from perilune.environments.core.episode_totals import EpisodeTotals as EpisodeTotals
from perilune.environments.core.keyed_random import KeyedRandom as KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator as EpisodeGenerator
from perilune.environments.core.multi_turn import MultiTurn as MultiTurn
from perilune.environments.core.multi_turn import ask as ask
from perilune.environments.core.multi_turn import end_episode as end_episode
from perilune.environments.core.protocol import AgentTurn as AgentTurn
from perilune.environments.core.protocol import Environment as Environment
from perilune.environments.core.protocol import EpisodeFailedError as EpisodeFailedError
from perilune.environments.core.protocol import Failure as Failure
from perilune.environments.core.protocol import Message as Message
from perilune.environments.core.protocol import Observation as Observation
from perilune.environments.core.protocol import Outcome as Outcome
from perilune.environments.core.protocol import Score as Score
from perilune.environments.core.protocol import Session as Session
from perilune.environments.core.protocol import Split as Split
from perilune.environments.core.protocol import Task as Task
from perilune.environments.core.protocol import Transcript as Transcript
from perilune.environments.core.registry import environment_ids as environment_ids
from perilune.environments.core.registry import make_environment as make_environment
from perilune.environments.core.single_turn import SingleTurn as SingleTurn
