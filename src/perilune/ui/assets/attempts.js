// The attempts at one task in all steps: its pass rate by step, and a strip of samples for each step.
const MOST = 60; // strips to show before the reader asks for more

const right = attempts => sum(attempts.map(one => one.members.filter(Episodes.isRight).length));
const isScored = ({ reward }) => reward !== null;
const samples = attempts => sum(attempts.map(one => one.members.length));

// Pass rates of the task in a stage that used it at several steps.
function curve([stage, attempts], open) {
  return Charts.lines({
    key: `attempts-${stage}`,
    title: `Pass rate of this task in ${stage}`,
    height: 120,
    x: { label: "step", name: "step", integer: true },
    y: { ...SHARE, ticks: 3 },
    series: [{
      name: "pass rate",
      x: attempts.map(one => one.step),
      y: attempts.map(one => right([one]) / one.members.filter(isScored).length),
      color: 1,
      points: attempts.length < MOST,
    }],
    pick: step => open(attempts.find(one => one.step === step)),
  });
}

function drawn({ attempts, searched, of }, go) {
  const read = (attempt, member) => go(attempt.stage, attempt.label, member.id);
  const stages = [...Map.groupBy(attempts, one => one.stage)];
  const rewards = attempts.flatMap(one => one.members.map(member => member.reward));
  const range = [Math.min, Math.max].map((outer, start) => rewards.reduce((a, b) => outer(a, b), start));
  const strip = one =>
    Groups.strip({ id: `${one.stage} ${one.label}`, task: one.label, members: one.members }, ...range, member => read(one, member));
  const strips = h("div.strips.attempts");
  const more = Page.plain(`Show all ${Format.integer(attempts.length)} steps`, () => draw(Infinity));
  function draw(most) {
    strips.replaceChildren(...attempts.slice(0, most).map(strip));
    more.hidden = attempts.length <= most;
  }
  draw(MOST);
  const said = ([stage, found]) => `${stage}: ${right(found)} of ${samples(found)} right in ${found.length} ${found.length === 1 ? "step" : "steps"}`;
  const rest = searched < of && ` Searched ${Format.integer(searched)} of ${Format.integer(of)} steps.`;
  return [
    h("p.muted", { role: "status" }, `${stages.map(said).join("; ")}.`, rest),
    ...stages.filter(([, found]) => found.length > 1).map(found => curve(found, one => read(one, one.members[0]))),
    strips,
    more,
  ];
}

// `gather` passes the attempts to a function, and `go` opens one of them.
function card(gather, go) {
  const body = h("div.stack");
  const ontoggle = () => {
    Address.set("task", details.open ? "open" : "");
    if (details.open) gather(found => body.replaceChildren(...drawn(found, go)));
  };
  const details = h("details", { open: Address.get("task") === "open", ontoggle }, h("summary", "The same task in other steps"), body);
  return h("div.card", details);
}

globalThis.Attempts = { card };
