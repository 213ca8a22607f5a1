"use strict";
// Draws every chart in the reader's colours and at the page's width, and says where a table goes on.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = () => {
    const [ink, soft, line, one, two] = dark.matches
      ? ["#e6eaee", "#9aa5b1", "#39424c", "#6aa9ec", "#ee9a5e"]
      : ["#1b1f24", "#5a6572", "#d7dde4", "#2a6fbb", "#c2571a"];
    const narrow = innerWidth < 640;
    const text = { labelColor: ink, titleColor: soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      background: "transparent", font: "system-ui, sans-serif", view: { stroke: null },
      axis: { ...text, gridColor: line, domainColor: soft, tickColor: soft, labelLimit: narrow ? 150 : 300 },
      axisX: { labelOverlap: true, tickCount: narrow ? 4 : 8 },
      legend: { ...text, orient: "top", labelLimit: 300, columns: narrow ? 2 : 6, gradientLength: narrow ? 160 : 300 },
      mark: { color: one }, bar: { color: one }, point: { color: one }, line: { color: one }, area: { color: one },
      text: { color: soft, fontSize: 12 }, rule: { color: soft },
      style: { limit: { color: two }, chosen: { color: two, fill: two }, value: { color: ink } },
      range: { category: [one, two, dark.matches ? "#5a9668" : "#6fae7b", soft] },
    };
  };
  const draw = () => {
    for (const figure of document.querySelectorAll("figure")) {
      const place = figure.querySelector(".chart");
      const spec = JSON.parse(figure.querySelector("script").textContent);
      spec.description = place.dataset.title;
      vegaEmbed(place, spec, {
        mode: "vega-lite", actions: false, ast: true, renderer: "svg", config: config(),
        tooltip: { theme: dark.matches ? "dark" : "light", disableDefaultStyle: false },
      }).catch((error) => { place.textContent = `This chart cannot be drawn: ${error.message}`; console.error(error); });
    }
  };
  const hint = () => {
    for (const table of document.querySelectorAll(".table")) {
      const wide = table.querySelector(".wide");
      table.querySelector(".hint").hidden = wide.scrollWidth <= wide.clientWidth;
    }
  };
  if (document.querySelector("figure")) {
    draw();
    dark.addEventListener("change", draw);
    matchMedia("(max-width: 640px)").addEventListener("change", draw);
  }
  hint();
  addEventListener("resize", hint);
})();
