(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const SERIES = 7;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const plots = [...document.querySelectorAll("script[data-plot]")].map((source) => ({
    id: source.dataset.plot, spec: source.textContent, view: 0, hidden: new Set(),
  }));

  const draw = (plot) => {
    const { data, layout, views } = JSON.parse(plot.spec);
    const shown = data.filter(({ meta, name }) => meta.view === plot.view && !plot.hidden.has(name));
    for (const trace of shown) {
      const paint = colour(`--series-${1 + trace.meta.series % SERIES}`);
      trace.marker = { ...trace.marker, color: paint };
      trace.line = { ...trace.line, color: paint };
    }
    const line = colour("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    const { y, log } = views[plot.view];
    Plotly.react(plot.id, shown, {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 13 },
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis, title: { text: y }, type: log ? "log" : "linear" },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  };

  const element = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const seriesButton = (plot, name, series) => {
    const mark = element("span", { class: "mark", "aria-hidden": "true", style: `--mark-colour: var(--series-${1 + series % SERIES})` });
    const button = element("button", { type: "button", "aria-pressed": "true" }, mark, name);
    button.addEventListener("click", () => {
      plot.hidden.has(name) ? plot.hidden.delete(name) : plot.hidden.add(name);
      button.setAttribute("aria-pressed", String(!plot.hidden.has(name)));
      draw(plot);
    });
    return button;
  };

  const viewChoice = (plot, view, number) => {
    const input = element("input", { type: "radio", name: `${plot.id}-view`, value: number });
    input.checked = number === plot.view;
    input.addEventListener("change", () => { plot.view = number; draw(plot); });
    return element("label", {}, input, view.name);
  };

  const control = (plot) => {
    const { data, views } = JSON.parse(plot.spec);
    const place = document.querySelector(`[data-controls="${plot.id}"]`);
    const series = new Map(data.map((trace) => [trace.name, trace.meta.series]));
    if (views.length > 1) {
      const choices = views.map((view, number) => viewChoice(plot, view, number));
      place.append(element("fieldset", {}, element("legend", {}, "Show"), ...choices));
    }
    if (series.size > 1) {
      const buttons = [...series].map(([name, number]) => seriesButton(plot, name, number));
      place.append(element("div", { role: "group", "aria-label": "Series" }, ...buttons));
    }
  };

  const drawAll = () => plots.forEach(draw);
  plots.forEach(control);
  drawAll();
  dark.addEventListener("change", drawAll);
  // print.js has changed the colours by then.
  addEventListener("beforeprint", drawAll);
  addEventListener("afterprint", drawAll);
})();
