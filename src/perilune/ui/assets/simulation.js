// The page of `perilune simulate` and `perilune simulate-serving`: a table of predictions, and charts.
const columns = Data.columns.map(([name, kind], place) => [name, row => row[place], kind]);
document.getElementById("main").append(
  h("h1.small", { id: "top" }, Data.title),
  h("p.lead", Data.lead),
  Page.section("predictions", "Predictions", null, Page.table(columns, Data.rows, "Predictions"), Data.notes.map(text => h("p.muted", text))),
  Page.section("charts", "Charts", null, h("div.stack", Data.figures.map(Charts.figure))),
);
Page.finish("Predicted, not measured.");
