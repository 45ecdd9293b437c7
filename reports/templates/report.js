(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = () => {
    for (const source of document.querySelectorAll("script[data-plot]")) {
      const { data, layout } = JSON.parse(source.textContent);
      const series = ["--series-1", "--series-2", "--series-3"].map(colour);
      data.forEach((trace, index) => { trace.marker.color = series[index % series.length]; });
      const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
      Plotly.react(source.dataset.plot, data, {
        ...layout,
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 13 },
        xaxis: { ...layout.xaxis, ...axis },
        yaxis: { ...layout.yaxis, ...axis },
      }, { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };
  draw();
  dark.addEventListener("change", draw);
})();
