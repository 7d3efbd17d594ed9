"use strict";
// Draws the plots of the page from the JSON in it, in the colours of the page's style sheet, light or dark.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const labels = { prefill: "prefill", mixed: "prefill and decode", decode: "decode", unknown: "iteration" };
  const config = { responsive: true, displayModeBar: false };

  // plotly reads a little HTML in texts: a name of a kernel is none
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

  function layout(colour, more) {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("text"), size: 12 }, margin: { l: 55, r: 15, t: 35, b: 45 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, hovermode: "closest",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
    };
    const made = Object.assign(base, more);
    made.xaxis = Object.assign({}, axis, more.xaxis);
    made.yaxis = Object.assign({}, axis, more.yaxis);
    return made;
  }

  const draw = {
    time(plots, colour) {
      const range = plots.x[plots.x.length - 1] - plots.x[0];
      const many = plots.x.length > 1;
      const traces = Object.entries(plots.wall).map(([phase, y]) => ({
        x: plots.x, y, name: labels[phase] + ", host", mode: many ? "lines+markers" : "markers", marker: { size: 5 },
        line: { color: colour(phase), width: 1.5 }, hovertemplate: plots.x_title + " %{x}: %{y:.3f} ms<extra></extra>",
      }));
      if (plots.busy.length) {
        traces.push({
          x: plots.x, y: plots.busy, name: "device busy", mode: many ? "lines+markers" : "markers", marker: { size: 4 },
          line: { color: colour("busy"), width: 1.5 }, hovertemplate: "device busy: %{y:.3f} ms<extra></extra>",
        });
      }
      const across = { title: { text: plots.x_title }, dtick: range < 10 ? 1 : undefined };
      const more = { xaxis: across, yaxis: { title: { text: "ms" }, rangemode: "tozero" } };
      return [traces, layout(colour, more)];
    },
    stack(plots, colour) {
      const traces = data.stack.map(([name, label]) => ({
        type: "bar", x: plots.x, y: plots.stack[label], name: label, marker: { color: colour(name), line: { width: 0 } },
        hovertemplate: label + ": %{y:.3f} ms<extra></extra>",
      }));
      const more = {
        barmode: "stack", bargap: 0.1,
        xaxis: { title: { text: plots.x_title }, dtick: plots.x.length < 10 ? 1 : undefined },
        yaxis: { title: { text: "ms" } },
        margin: { l: 55, r: 15, t: 60, b: 45 },
      };
      return [traces, layout(colour, more)];
    },
    kernels(plots, colour) {
      const rows = plots.kernels.slice().reverse();
      const trace = {
        type: "bar", orientation: "h", x: rows.map((row) => row[1]), y: rows.map((_, number) => number),
        text: rows.map((row) => (100 * row[1]).toFixed(1) + " %"), textposition: "outside", cliponaxis: false,
        customdata: rows.map((row) => plain(row[0])), marker: { color: rows.map((row) => colour(row[2])) },
        hovertemplate: "%{customdata}: %{text}<extra></extra>",
      };
      const ticks = { tickvals: trace.y, ticktext: rows.map((row) => plain(short(row[0], 38))), showgrid: false };
      const more = { xaxis: { tickformat: ".0%", rangemode: "tozero" }, yaxis: ticks, margin: { l: 55, r: 50, t: 10, b: 35 } };
      return [[trace], layout(colour, more)];
    },
    strip(plots, colour) {
      const strip = plots.strip;
      const kinds = Array.from(new Set(strip.pieces.map((piece) => piece[2])));
      const traces = kinds.map((kind) => {
        const pieces = strip.pieces.filter((piece) => piece[2] === kind);
        return {
          type: "bar", orientation: "h", name: kind, y: pieces.map((piece) => piece[0]),
          base: pieces.map((piece) => piece[3]), x: pieces.map((piece) => piece[4]), width: 0.7,
          customdata: pieces.map((piece) => plain(strip.names[piece[1]])),
          marker: { color: colour(kind), line: { width: 0 } },
          hovertemplate: "%{customdata}<br>from %{base:.1f} us, for %{x:.1f} us<extra></extra>",
        };
      });
      const lanes = { tickvals: strip.lanes.map((_, n) => n), ticktext: strip.lanes.map(plain), autorange: "reversed" };
      const more = { barmode: "overlay", xaxis: { title: { text: "microseconds" } }, yaxis: lanes, showlegend: true };
      more.margin = { l: 80, r: 15, t: 30, b: 45 };
      return [traces, layout(colour, more)];
    },
  };

  function drawAll() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    for (const place of document.querySelectorAll(".plot")) {
      const [traces, look] = draw[place.dataset.plot](data.captures[Number(place.dataset.capture)], colour);
      Plotly.react(place, traces, look, config);
    }
  }

  drawAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
