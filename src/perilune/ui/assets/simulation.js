// The page of `perilune simulate` and `perilune simulate-serving`: a table of predictions, and charts.
const columns = Data.columns.map(([name, kind], place) => [name, row => row[place], kind]);
drawPage(html`
  <h1 class="small" id="top">${Data.title}</h1>
  ${lead(Data.lead)}
  <${Section} id="predictions" title="Predictions">
    <${Table} columns=${columns} rows=${Data.rows} caption="Predictions" />${Data.notes.map(text => html`<p class="muted">${text}</p>`)}
  <//>
  <${Section} id="charts" title="Charts"><div class="stack">${Data.figures.map(Charts.figure)}</div><//>`);
finishPage("Predicted, not measured.");
