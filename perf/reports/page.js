// Draws the figures that the page carries as JSON, in the colours of its style sheet; asks nothing of anybody.
"use strict";
(() => {
  const carried = (id) => JSON.parse(document.getElementById(`carried-${id}`)?.textContent ?? "null");
  const figures = carried("figures") ?? {};
  const spreads = carried("spreads") ?? [];
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  let chosen = "";

  // var(--name) is a property of page.css, whatever figure or scale it stands in
  const coloured = (value, style) => {
    if (typeof value === "string") {
      return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((each) => coloured(each, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, coloured(each, style)]));
    }
    return value;
  };

  const laid = (figure, style) => {
    const line = style.getPropertyValue("--line").trim();
    const layout = coloured(figure.layout, style);
    for (const name of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      layout[name] = {
        gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...layout[name],
        separatethousands: true, title: { standoff: 10, font: { size: 12 }, ...layout[name].title },
      };
      if (layout[name].type === "log" && !layout[name].tickvals) layout[name].dtick = "D2";
    }
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: figure.height, autosize: true,
      margin: { l: 56, r: 18, t: 34, b: 44 }, hovermode: "closest", bargap: 0.3, separators: ".,",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style.getPropertyValue("--soft").trim() },
      hoverlabel: {
        bgcolor: style.getPropertyValue("--panel").trim(), bordercolor: line,
        font: { color: style.getPropertyValue("--ink").trim(), size: 12 },
      },
      ...layout,
      legend: { orientation: "h", traceorder: "normal", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", ...layout.legend },
    };
  };

  const draw = (name) => {
    const place = document.getElementById(`chart-${name}`);
    const style = getComputedStyle(root);
    const figure = figures[name];
    const options = { responsive: true, displayModeBar: false }; // a double click undoes a zoom
    return Plotly.react(place, coloured(figure.traces, style), laid(figure, style), options);
  };

  const themed = () => {
    root.dataset.theme = paper.matches ? "light" : chosen || (dark.matches ? "dark" : "light");
    return Promise.all(Object.keys(figures).map(draw));
  };

  // what is chosen above a figure changes its layout: "yaxis.type" is layout.yaxis.type
  const change = (layout, changes) => {
    for (const [path, value] of Object.entries(changes)) {
      const names = path.split(".");
      const last = names.pop();
      names.reduce((at, name) => (at[name] ??= {}), layout)[last] = value;
    }
  };
  for (const button of document.querySelectorAll("[data-figure]")) {
    button.addEventListener("click", () => {
      const figure = figures[button.dataset.figure];
      change(figure.layout, figure.switches[button.textContent]);
      for (const each of button.parentElement.children) each.setAttribute("aria-pressed", String(each === button));
      draw(button.dataset.figure);
    });
  }

  // a histogram: the least ns of each bucket, as steps, and how many requests are in it
  const levels = spreads.map((level) => {
    let ns = 0;
    let through = 0;
    return {
      ...level,
      ns: level.steps.map((step) => (ns += step)),
      through: level.counts.map((count) => (through += count)),
    };
  });
  const within = (level, ms) => {
    let [low, high] = [0, level.ns.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (level.ns[middle] <= ms * 1e6) low = middle + 1;
      else high = middle;
    }
    return low ? level.through[low - 1] / level.through.at(-1) : 0;
  };
  const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: value < 100 ? 2 : 0 });
  const three = (value) => Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 });

  const aim = (ms) => {
    const good = levels.map((level) => level.rate * within(level, ms));
    const at = good.indexOf(Math.max(...good));
    const met = levels.filter((level, each) => good[each] >= 0.99 * level.rate).sort((a, b) => b.rate - a.rate)[0];
    const output = document.querySelector(".target output");
    output.replaceChildren();
    const bold = (words) => output.append(Object.assign(document.createElement("b"), { textContent: words }));
    bold(`${number(good[at])} inferences/s`);
    output.append(` within ${three(ms)} ms at ${levels[at].words}, ${three((good[at] / levels[at].rate) * 100)}% of its answers. `);
    output.append(met ? `99% of answers are within it up to ${met.words}: ` : "No level has 99% of its answers within it.");
    if (met) bold(`${number(met.rate)} inferences/s`);
    if (figures.within) {
      figures.within.traces[0].y = good;
      figures.within.traces[1].y = levels.map((level, each) => level.rate - good[each]);
      draw("within");
    }
    if (figures.yields) {
      Object.assign(figures.yields.layout.shapes[0], { x0: ms, x1: ms });
      draw("yields");
    }
  };
  const [slider, typed] = ["slider", "typed"].map((id) => document.getElementById(id));
  if (slider && levels.length) {
    slider.addEventListener("input", () => {
      const ms = Number((10 ** Number(slider.value)).toPrecision(3));
      typed.value = String(ms);
      aim(ms);
    });
    typed.addEventListener("input", () => {
      const ms = Number(typed.value);
      if (!(ms > 0)) return;
      slider.value = String(Math.log10(ms));
      aim(ms);
    });
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch { // a page from a file may be refused the clipboard: then it is one key away
        getSelection().selectAllChildren(text);
        button.textContent = "Press Ctrl-C";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }
  document.getElementById("theme")?.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    themed();
  });
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => {
      const blob = new Blob([document.getElementById(`carried-${button.dataset.save}`).textContent], { type: "application/json" });
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: button.dataset.name });
      link.click();
      URL.revokeObjectURL(link.href);
    });
  }
  dark.addEventListener("change", themed);
  paper.addEventListener("change", themed);
  themed().then(() => (root.dataset.drawn = "yes"));
})();
