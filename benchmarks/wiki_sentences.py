"""Sentences of a wiki: ten with a fault for each kind that sentences can have, and sentences without a fault.

They were written before the rules were run on them, and none was removed because of a rule's answer. In the
sentences, `MEAN`, `SINGLE`, `DIFFERENCE` and `OTHER` stand for queries: the mean of three seeds, of one seed,
a paired difference whose interval contains 0, and the mean of another setting whose interval overlaps.
"""

DEAD_LINKS = (
    "See [the other run](../runs/01ABCDEF.md).",
    "The details are in [[runs/01ZZZZZZ]].",
    "We copied the settings of [[recipes/forgotten|the older recipe]].",
    "An [earlier page](earlier-attempt.md) asks the same.",
    "Compare this with [the sweep](../recipes/sweep-of-rates.md#results).",
    "The environment has [its own page](../environments/arithmetic-with-carries.md).",
    "Read [[questions/why-does-it-stop]] first.",
    "As [the notes on algorithms](../algorithms/reinforce-with-baseline.md) explain, the baseline matters.",
    "Both links lead on: [the index](../index.md) and [the glossary](../glossary.md).",
    "The plot is from [this run](../runs/01M0NDAY.md), which was deleted.",
)

BAD_QUERIES = (  # queries that have no answer
    "It had {{ pass@9 of RECIPE with arm=a }}.",
    "At the end, the reward was {{ mean last.reward of RECIPE with arm=a }}.",
    "The old recipe reached {{ mean pass@1 of recipe vanished stage test }}.",
    "One of them got {{ pass@1 of run 01NEVERWAS }}.",
    "On average: {{ average pass@1 of RECIPE with arm=a }}.",
    "All settings together give {{ mean pass@1 of RECIPE }}.",
    "The gain is {{ difference pass@1 of RECIPE with arm=a }}.",
    "With the long prompt it was {{ mean pass@1 of RECIPE with prompt=long }}.",
    "There were {{ count of recipe words stage training }} runs of that stage.",
    "The pair differs by {{ difference pass@1 of RECIPE with arm=a seed=1 minus RECIPE with arm=one }}.",
)

CITING = (  # RUN stands for a query of a run that is missing, fails verification, or was replaced
    "It had RUN.",
    "One run reached RUN before we stopped.",
    "We started from a checkpoint with RUN.",
    "A single try gave RUN, which surprised us.",
    "The first attempt (RUN) used the short prompt.",
    "Its figure was RUN; the log shows nothing unusual.",
    "For reference: RUN.",
    "A rerun on the other machine gave RUN.",
    "With the default settings, we saw RUN.",
    "The figure in the slides, RUN, comes from this run.",
)

BEST = (  # RUN stands for the answer of a query, which selects runs as the second part says
    ("The best run so far: RUN.", ""),
    ("Our record is RUN.", " with arm=a"),
    ("Start from the checkpoint of RUN.", " with arm=b"),
    ("Nothing has passed RUN yet.", " with arm=one"),
    ("The first arm did best in RUN.", " with arm=a"),
    ("We present RUN in the talk.", " with seed=1"),
    ("With the first seed, the best is RUN.", " with seed=0"),
    ("To reproduce the table, use RUN.", " with arm=b seed=2"),
    ("The best of the second arm is RUN.", " with arm=b"),
    ("All later work builds on RUN.", " with seed=2"),
)

FEW_SEEDS = (
    "The third arm is better: SINGLE.",
    "It beats the other two with SINGLE.",
    "Arm one outperforms the rest (SINGLE).",
    "A larger batch improves the result to SINGLE.",
    "The longer prompt raised the pass rate to SINGLE.",
    "It is more accurate than the first arm: SINGLE.",
    "The curriculum doubles the pass rate, to SINGLE.",
    "It gains a lot, and ends at SINGLE.",
    "With SINGLE, the third arm improves on the baseline.",
    "Its accuracy went up to SINGLE.",
)

OVERLAPS = (
    "The second arm improves by DIFFERENCE.",
    "The second arm is better than the first (DIFFERENCE).",
    "With the warm-up, results are higher by DIFFERENCE.",
    "It wins: DIFFERENCE.",
    "The second arm beats the first, OTHER to MEAN.",
    "The pass rate is higher with the second arm, OTHER instead of MEAN.",
    "The second prompt is more effective than the first: OTHER and MEAN.",
    "We measured a gain of DIFFERENCE over the seeds.",
    "The first arm, at MEAN, is inferior to the second, at OTHER.",
    "Switching to the second arm helps: DIFFERENCE.",
)

UNCITED_BEST = (
    "This is the best recipe that there is.",
    "The lowest loss came from the small batch.",
    "No other setting comes close to this one.",
    "It has the highest pass rate of all arms.",
    "The curriculum is state of the art on this environment.",
    "Of all algorithms, this one works best here.",
    "Arm two tops the table.",
    "The best results need a long warm-up.",
    "Among the settings, the second has the lowest error.",
    "It is the strongest recipe so far.",
)

UNCITED_COMPARISONS = (
    "The second arm is better than the first.",
    "The curriculum is more accurate than uniform sampling.",
    "Adding the calculator doubles the pass rate.",
    "This improves on the baseline.",
    "The small model outperforms the large one.",
    "Training with a KL term is far more stable than training without it.",
    "The new prompt beats the old one on every seed.",
    "The second arm needs fewer tokens than the first to get there.",
    "Supervised training alone comes out ahead of the mixture.",
    "The long warm-up halved the loss.",
)

BARE_NUMBERS = (
    "It reached 73.5% once.",
    "The learning rate was 2e-4 in all runs.",
    "The loss ended at 1.5e-3.",
    "It took 12k episodes until the reward rose.",
    "The curriculum added 94pp to the pass rate.",
    "Sampling is 3x as fast with the cache.",
    "The two strategies ended up 50/50.",
    "About 1/3 of the answers were cut off.",
    "The reward rose from 0.2 to nearly all of the maximum.",
    "It solves nine out of ten tasks.",
)

SOUND = (
    # references and names with numbers
    "The method is described in section 3.2 of the paper.",
    "Equation 4 and figure 2 define the advantage.",
    "See Table 3.1 for the notation.",
    "We follow arXiv 2402.03300 here.",
    "We follow chapter 13 of the textbook by Sutton and Barto.",
    "The runs used Python 3.12 and an H100.",
    "The metric is pass@1, and pass@8 is only for reference.",
    "The model is SmolLM2-135M, which fits on a laptop.",
    "We compared seeds 0 to 4.",
    "Seeds 0, 1 and 2 share the same data.",
    "At step 40 the evaluation begins.",
    "The log of steps 10 to 20 is in the run's folder.",
    "The checkpoint dates from 2026-08-01.",
    "We began this page on 3 August 2026.",
    "The environment is a copy of GSM8K without the hard tasks.",
    "The policy is stored with 16-bit weights.",
    "The 2-layer critic shares no weights with the policy.",
    "The code is at https://example.org/results/2024/12/runs.",
    "Appendix B.2 lists the prompts.",
    "Version 0.1 of the recipe had a mistake in the prompt.",
    "Set the rate to `2e-4` and keep the rest.",
    # words of comparison that compare nothing
    "We sample the best of several answers with a judge.",
    "The rollout servers raise an error if the queue is full.",
    "It is better to stop early here.",
    "A lower temperature was not tried.",
    "The higher layers are frozen.",
    "Answers longer than the limit are cut off.",
    "The prompt has more than one example.",
    "More often than not, the answer ends with a newline.",
    "Runs are no longer than an hour.",
    "The learning rate is halved after every epoch.",
    "The batch size doubles when the reward stops rising.",
    "The first half of the tasks is held out.",
    "We split the data into two halves.",
    "The script doubles as a check of the data.",
    "The check is stricter than the parser needs it to be.",
    "The tokens are older than the bound allows.",
    "The game ends when a player wins.",
    "The reward for a win is one point.",
    "A slower machine only delays the run.",
    # plans, questions and doubts
    "Is the second arm better than the first?",
    "We do not know whether the curriculum is better than uniform sampling.",
    "If the second arm beats the first, we repeat it with more seeds.",
    "The next experiment may improve the pass rate.",
    "We expect that a longer warm-up improves on this.",
    "Our hypothesis is that the critic outperforms the group baseline.",
    "The aim is a higher pass rate with the same tokens.",
    "It remains to be tested which prompt is best.",
    "How much does the reward gain from the second turn?",
    "Maybe fewer samples are enough.",
    # plain descriptions
    "The policy writes its working before the answer.",
    "The verifier reads only the last line.",
    "Most failures are answers in the wrong form.",
    "The reward is the share of tests that pass.",
    "Every answer ends with a stop token.",
    "The data contains each task once.",
    "We changed the prompt, and nothing else.",
    "The critic starts from the weights of the policy.",
    "The teacher's answers were filtered by the verifier.",
    "Two students read the episodes by hand.",
    "The run was stopped by hand, because the disk was full.",
    "All arms share the same initial checkpoint.",
    "The curve is noisy, since the batch is small.",
    "The episodes with a tool call are marked in the report.",
    # numbers and comparisons with their evidence
    "The first arm reached MEAN.",
    "Over the same seeds, the second arm reached OTHER.",
    "No difference shown: DIFFERENCE.",
    "One run of the third arm reached SINGLE.",
    "The second arm changes the pass rate by DIFFERENCE, so we keep the first.",
)
