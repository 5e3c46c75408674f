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

function Found({ attempts, searched, of, go }) {
  const [most, setMost] = useState(MOST);
  const read = (attempt, member) => go(attempt.stage, attempt.label, member.id);
  const stages = [...Map.groupBy(attempts, one => one.stage)];
  const rewards = attempts.flatMap(one => one.members.map(member => member.reward));
  const range = [Math.min, Math.max].map((outer, start) => rewards.reduce((a, b) => outer(a, b), start));
  const strip = one =>
    Groups.strip({ id: `${one.stage} ${one.label}`, task: one.label, members: one.members }, ...range, member => read(one, member));
  const said = ([stage, found]) => `${stage}: ${right(found)} of ${samples(found)} right in ${found.length} ${found.length === 1 ? "step" : "steps"}`;
  const rest = searched < of && ` Searched ${Format.integer(searched)} of ${Format.integer(of)} steps.`;
  return html`
    <p class="muted" role="status">${stages.map(said).join("; ")}.${rest}</p>
    ${stages.filter(([, found]) => found.length > 1).map(found => curve(found, one => read(one, one.members[0])))}
    <div class="strips attempts">${attempts.slice(0, most).map(strip)}</div>
    <${Groups.More} all=${attempts} most=${most} setMost=${setMost} what="steps" />`;
}

// `gather` passes the attempts at the task of a group to a function, and `go` opens one of them.
function Attempts({ group, gather, go }) {
  const [kept, keep] = useSetting("task");
  const [found, setFound] = useState(null);
  const isOpen = kept === "open";
  useEffect(() => {
    if (isOpen) gather(group.task, setFound);
  }, [group, isOpen]);
  const body = useMemo(() => found && html`<${Found} ...${found} go=${go} />`, [found]);
  return html`<div class="card">
    <details open=${isOpen} ontoggle=${event => keep(event.target.open ? "open" : "")}>
      <summary>The same task in other steps</summary>
      <div class="stack">${body}</div>
    </details>
  </div>`;
}

globalThis.Attempts = Attempts;
