// The timeline's canvas. It draws the boxes that Python chose for the view, moves them at once when the view changes, and asks for new ones.
const GUTTER = 150, AXIS = 22, GAP = 3, HEAD = 17, RIGHT = 8, MIN_NS = 200;
const HEIGHTS = { steps: 14, ops: 13, calls: 20, graphs: 14, stream: 26 };
const ON_DARK = new Set(["compute", "host", "draft", "graph", "communication", "wait"]);
const KEY = ["compute", "communication", "copy", "host", "wait", "event wait", "draft", "verify", "graph"];
const SAID = { host: "host calls", wait: "host blocked", "event wait": "host waits for an event", graph: "graph replay" };

function make(tag, name, text = "") {
  const e = document.createElement(tag);
  e.className = name;
  e.textContent = text;
  return e;
}

function numbers(Kind, view) { // a copy: a buffer need not begin where its numbers may
  return new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

function said(ns) {
  const abs = Math.abs(ns);
  return abs < 1e3 ? `${ns.toFixed(0)} ns` : abs < 1e6 ? `${(ns / 1e3).toFixed(2)} µs` : abs < 1e9 ? `${(ns / 1e6).toFixed(3)} ms` : `${(ns / 1e9).toFixed(3)} s`;
}

function unpack(v) {
  const of = { ...v };
  const kinds = { row: Uint16Array, start: Float64Array, end: Float64Array, colour: Uint8Array, name: Uint16Array, count: Uint32Array, share: Uint8Array, merged: Uint8Array, hit: Uint8Array, arrows: Float64Array };
  for (const [name, Kind] of Object.entries(kinds)) of[name] = numbers(Kind, v[name]);
  return of;
}

function render({ model, el }) {
  const scene = model.get("scene"), tracks = scene.tracks;
  const root = make("div", "dspark-timeline");
  root.tabIndex = 0;
  const bar = make("div", "bar"), box = make("input", ""), count = make("span", "soft"), info = make("div", "info"), tip = make("div", "tip");
  box.placeholder = "search names";
  box.setAttribute("aria-label", "search names");
  const scroll = make("div", "scroll"), canvas = make("canvas", ""), stat = make("span", "soft"), error = make("div", "error");
  const button = (text, title, act) => { const b = make("button", "", text); b.title = title; b.onclick = act; bar.append(b); return b; };
  bar.append(make("b", "", scene.title || "Timeline"), box);
  button("‹", "previous match", () => model.send({ do: "next", way: -1 }));
  button("›", "next match (Enter)", () => model.send({ do: "next", way: 1 }));
  bar.append(count);
  button("+", "zoom in (W, or Ctrl and the wheel)", () => zoom(0.5, middle()));
  button("−", "zoom out (S)", () => zoom(2, middle()));
  button("all", "the whole trace", () => go(scene.lo, scene.hi));
  const doubts = make("div", "doubts");
  scene.groups.forEach((g) => {
    if (!g.doubts.length) return;
    const fold = make("details", ""), who = scene.groups.length > 1 ? `${g.name}: ` : "";
    fold.append(make("summary", "", `⚠ ${who}${g.doubts[0]}${g.doubts.length > 1 ? ` (and ${g.doubts.length - 1} more)` : ""}`));
    g.doubts.slice(1).forEach((d) => fold.append(make("div", "", d)));
    doubts.append(fold);
  });
  const key = make("div", "key");
  scene.kinds.forEach((k, i) => {
    if (!KEY.includes(k)) return;
    const s = make("span", ""), mark = make("i", "");
    mark.style.background = k === "wait" ? `repeating-linear-gradient(45deg, ${scene.colours[i]} 0 2px, white 2px 4px)` : k === "event wait" ? `radial-gradient(${scene.colours[i]} 1px, white 1.5px) 0 0/4px 4px` : scene.colours[i];
    s.append(mark, SAID[k] ?? k);
    key.append(s);
  });
  const help = make("span", "", "drag: move · Shift and drag: zoom into a span · Ctrl and wheel, W S: zoom · A D: move · click: what it is");
  key.append(help);
  scroll.append(canvas);
  stat.classList.add("stat");
  root.append(bar, stat, doubts, error, scroll, key, info, tip);
  el.append(root);
  info.append(make("span", "soft", scene.note));

  // -- rows --------------------------------------------------------------------------------------------------
  const at = [], heads = new Map();
  let bottom = AXIS;
  tracks.forEach((t) => {
    if (!heads.has(t.group)) { heads.set(t.group, bottom); bottom += HEAD; }
    at.push([bottom, HEIGHTS[t.kind]]);
    bottom += HEIGHTS[t.kind] + GAP;
  });
  const below = new Map();
  tracks.forEach((t, i) => below.set(t.group, at[i][0] + at[i][1]));

  let view = unpack(model.get("view")), lo = view.lo, hi = view.hi, jump = view.jump, width = 0;
  let waiting = 0, again = false, drag = null, hover = null;
  const g = canvas.getContext("2d");
  const plot = () => Math.max(width - GUTTER - RIGHT, 50);
  const x = (ns) => GUTTER + ((ns - lo) / (hi - lo)) * plot();
  const time = (px) => lo + ((px - GUTTER) / plot()) * (hi - lo);
  const middle = () => (lo + hi) / 2;

  function hatch(colour, dotted) {
    const c = document.createElement("canvas");
    c.width = c.height = 6;
    const p = c.getContext("2d");
    p.fillStyle = "white"; p.fillRect(0, 0, 6, 6);
    p.strokeStyle = p.fillStyle = colour;
    if (dotted) { p.fillRect(1, 1, 2, 2); p.fillRect(4, 4, 2, 2); }
    else { p.lineWidth = 2; p.beginPath(); p.moveTo(-1, 7); p.lineTo(7, -1); p.stroke(); }
    return g.createPattern(c, "repeat");
  }
  const fills = scene.colours.map((c, i) => (scene.kinds[i] === "wait" ? hatch(c, false) : scene.kinds[i] === "event wait" ? hatch(c, true) : c));
  const doubt = hatch("rgba(179,71,0,0.55)", false);

  // -- drawing -----------------------------------------------------------------------------------------------
  function draw() {
    const dpr = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(bottom * dpr)) {
      canvas.width = Math.round(width * dpr); canvas.height = Math.round(bottom * dpr);
      canvas.style.width = `${width}px`; canvas.style.height = `${bottom}px`;
    }
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.fillStyle = "white"; g.fillRect(0, 0, width, bottom);
    g.font = "10.5px system-ui, 'DejaVu Sans', sans-serif"; g.textBaseline = "middle";
    tracks.forEach((t, i) => {
      g.fillStyle = "#F8F9FB"; g.fillRect(GUTTER, at[i][0], plot(), at[i][1]);
      g.fillStyle = "#6B7280"; g.textAlign = "right";
      clipped(t.label, GUTTER - 6, at[i][0] + at[i][1] / 2, GUTTER - 10);
    });
    g.textAlign = "left"; g.fillStyle = "#1F2937"; g.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
    heads.forEach((y, k) => clipped(scene.groups[k].name, 6, y + HEAD / 2, GUTTER - 8));
    g.font = "10.5px system-ui, 'DejaVu Sans', sans-serif";
    g.save(); g.beginPath(); g.rect(GUTTER, 0, plot(), bottom); g.clip();
    axis(); boxes(); bands(); marks(); arrows(); outline();
    g.restore();
    if (drag?.zooming) { g.fillStyle = "rgba(86,180,233,0.25)"; g.fillRect(Math.min(drag.x0, drag.x1), 0, Math.abs(drag.x1 - drag.x0), bottom); }
  }
  function clipped(text, px, y, most) {
    let s = text;
    while (s.length > 1 && g.measureText(s).width > most) s = s.slice(0, -2);
    g.fillText(s === text ? s : `${s}…`, px, y);
  }
  function axis() {
    const span = hi - lo, raw = span / Math.max(plot() / 110, 1), ten = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((k) => k * ten).find((k) => k >= raw);
    for (let t = Math.ceil(lo / tick) * tick; t <= hi; t += tick) {
      g.strokeStyle = "#E5E7EB"; line(x(t), AXIS - 5, x(t), bottom);
      g.fillStyle = "#6B7280"; g.textAlign = "center";
      const [unit, per] = tick < 2e8 ? ["ms", 1e6] : ["s", 1e9], digits = Math.max(Math.ceil(Math.log10(per / tick)), 0);
      if (x(t) > GUTTER + 24 && x(t) < width - 30) g.fillText(`${(t / per).toFixed(digits)} ${unit}`, x(t), AXIS / 2);
    }
  }
  function line(a, b, c, d) { g.beginPath(); g.moveTo(a, b); g.lineTo(c, d); g.stroke(); }
  function boxes() {
    g.textAlign = "left";
    for (const pass of [1, 0]) for (let i = 0; i < view.n; i++) { // what is merged lies under what is not
      if (view.merged[i] !== pass) continue;
      const [y, h] = at[view.row[i]], a = x(view.start[i]), w = Math.max(x(view.end[i]) - a, 1), c = view.colour[i];
      if (a + w < GUTTER || a > width) continue;
      g.fillStyle = fills[c];
      if (pass) {
        const up = Math.max((h * view.share[i]) / 255, 2);
        g.globalAlpha = 0.16; g.fillRect(a, y, w, h);
        g.globalAlpha = 0.85; g.fillRect(a, y + h - up, w, up); g.globalAlpha = 1;
      } else {
        g.fillRect(a, y, w, h);
        if (w > 5 && scene.kinds[c] !== "step") { g.fillStyle = "white"; g.fillRect(a + w - 0.6, y, 0.6, h); }
        if (scene.kinds[c].endsWith("wait") || scene.kinds[c] === "step") { g.strokeStyle = scene.kinds[c] === "step" ? "#C3CAD6" : scene.colours[c]; g.strokeRect(a + 0.5, y + 0.5, Math.max(w - 1, 0.5), h - 1); }
        const from = Math.max(a, GUTTER), room = Math.min(a + w, width) - from - 6;
        if (room > 26) word(view.names[view.name[i]], from + 3, y, h, room, c);
      }
      if (view.hit[i]) { g.strokeStyle = "#111827"; g.strokeRect(a - 0.5, y - 0.5, w + 1, h + 1); }
    }
  }
  function word(text, px, y, h, room, c) {
    const waiting = scene.kinds[c].endsWith("wait");
    const s = text.slice(0, Math.max(Math.floor(room / 5.6), 1)), wide = Math.min(g.measureText(s).width, room);
    if (waiting) { g.fillStyle = "rgba(255,255,255,0.85)"; g.fillRect(px - 1, y + 2, wide + 3, h - 4); }
    g.fillStyle = waiting ? "#7A2E00" : ON_DARK.has(scene.kinds[c]) ? "white" : "#1F2937";
    g.fillText(s.length < text.length ? `${s.slice(0, -1)}…` : s, px, y + h / 2 + 0.5, room);
  }
  function bands() {
    scene.groups.forEach((group, k) => group.bands.forEach(([a, b, why]) => {
      const rows = tracks.map((t, i) => i).filter((i) => tracks[i].group === k && ["stream", "graphs"].includes(tracks[i].kind));
      const use = rows.length ? rows : tracks.map((t, i) => i).filter((i) => tracks[i].group === k).slice(-1);
      if (!use.length || b < lo || a > hi) return;
      const y = at[use[0]][0], end = at[use.at(-1)][0] + at[use.at(-1)][1];
      g.globalAlpha = 0.45; g.fillStyle = doubt; g.fillRect(x(a), y, x(b) - x(a), end - y); g.globalAlpha = 1;
      if (x(b) - x(a) > 60) { g.fillStyle = "white"; g.fillRect(Math.max(x(a), GUTTER) + 2, y + 1, Math.min(g.measureText(why).width, x(b) - x(a) - 8) + 4, 14); g.fillStyle = "#B34700"; g.fillText(why, Math.max(x(a), GUTTER) + 4, y + 8, x(b) - x(a) - 8); }
    }));
  }
  function marks() {
    g.strokeStyle = "#6B7280"; g.fillStyle = "#6B7280"; g.setLineDash([2, 2]);
    let last = new Map();
    view.steps.forEach(([ns, group, text]) => {
      line(x(ns), heads.get(group) + 2, x(ns), below.get(group));
      if (x(ns) - (last.get(group) ?? -99) > 44) { g.fillText(text, x(ns) + 3, heads.get(group) + HEAD / 2); last.set(group, x(ns)); }
    });
    g.setLineDash([]);
    g.fillStyle = "#B34700";
    last = new Map();
    view.flags.forEach(([ns, dur, track]) => {
      const px = x(Math.max(ns, lo));
      if (px - (last.get(track) ?? -99) < 9) return;
      last.set(track, px);
      g.fillText("⚑", px, at[track][0] - 2);
    });
  }
  function arrow(t0, r0, t1, r1, colour, thick) {
    const a = x(t0), b = x(t1), y0 = at[r0][0] + at[r0][1], y1 = at[r1][0];
    g.strokeStyle = g.fillStyle = colour; g.lineWidth = thick;
    g.beginPath(); g.moveTo(a, y0); g.bezierCurveTo(a, (y0 + y1) / 2, b, (y0 + y1) / 2, b, y1 - 3); g.stroke();
    g.beginPath(); g.moveTo(b - 3, y1 - 4); g.lineTo(b + 3, y1 - 4); g.lineTo(b, y1 + 1); g.fill(); g.lineWidth = 1;
  }
  function arrows() {
    const v = view.arrows, last = new Map();
    for (let i = 0; i + 3 < v.length; i += 4) { // one of those that would lie on each other
      const row = v[i + 3], [a, b] = last.get(row) ?? [-99, -99];
      if (x(v[i]) - a < 12 && Math.abs(x(v[i + 2]) - b) < 12) continue;
      last.set(row, [x(v[i]), x(v[i + 2])]);
      arrow(v[i], v[i + 1], v[i + 2], row, "rgba(31,41,55,0.35)", 1);
    }
  }
  function outline() {
    const p = model.get("picked");
    if (!p.html) return;
    if (p.span?.length) { const [y, h] = at[p.track]; g.strokeStyle = "#111827"; g.lineWidth = 2; g.strokeRect(x(p.span[0]) - 1, y - 1, Math.max(x(p.span[1]) - x(p.span[0]), 1) + 2, h + 2); g.lineWidth = 1; }
    if (p.arrow?.length) arrow(...p.arrow, "#111827", 2);
  }

  // -- the view ----------------------------------------------------------------------------------------------
  function ask() { // one question at a time; the last one asked meanwhile follows
    if (waiting) { again = true; return; }
    waiting = performance.now();
    root.dataset.waiting = "1";
    model.send({ do: "zoom", lo: Math.round(lo), hi: Math.round(hi), width: Math.round(plot()) });
  }
  function go(a, b) {
    tip.style.display = "none";
    const span = Math.max(b - a, MIN_NS), most = (scene.hi - scene.lo) * 1.2 + MIN_NS;
    const mid = Math.min(Math.max((a + b) / 2, scene.lo), scene.hi);
    lo = mid - Math.min(span, most) / 2; hi = mid + Math.min(span, most) / 2;
    draw(); ask();
  }
  function zoom(by, around) { go(around + (lo - around) * by, around + (hi - around) * by); }
  function tell() {
    const merged = view.merged.reduce((s, m, i) => s + (m ? view.count[i] : 0), 0), own = view.n - view.merged.reduce((s, m) => s + m, 0);
    const bits = [`${said(view.hi - view.lo)} in view`, own ? `${own.toLocaleString("en")} events drawn one by one` : "no event drawn by itself"];
    if (merged) bits.push(`${merged.toLocaleString("en")} merged: a column is ${said(view.cell)}, as high as it is busy`);
    if (view.num_flags && !view.flags.length) bits.push(`⚑ ${view.num_flags} waits, zoom in for flags`);
    if (view.num_arrows && !view.arrows.length) bits.push(`${view.num_arrows.toLocaleString("en")} launches, zoom in for arrows`);
    stat.textContent = bits.join(" · ");
    Object.assign(root.dataset, { lo: view.lo, hi: view.hi, boxes: view.n, own, merged, bytes: view.bytes, madeMs: view.made_ms });
  }
  model.on("change:view", () => {
    view = unpack(model.get("view"));
    if (view.jump !== jump) { jump = view.jump; lo = view.lo; hi = view.hi; }
    draw(); tell();
    if (waiting) root.dataset.roundTripMs = (performance.now() - waiting).toFixed(1);
    waiting = 0;
    delete root.dataset.waiting;
    if (again) { again = false; ask(); }
  });
  model.on("change:found", () => { const f = model.get("found"); count.textContent = f.text ? `${f.at >= 0 ? `${f.at + 1} of ` : ""}${f.count.toLocaleString("en")} found` : ""; });
  model.on("change:picked", () => { const p = model.get("picked"); info.innerHTML = p.html ?? ""; if (!p.html) info.append(make("span", "soft", scene.note)); draw(); });
  model.on("change:error", () => { error.textContent = model.get("error"); waiting = 0; });

  // -- hands -------------------------------------------------------------------------------------------------
  function under(px, py) {
    const track = at.findIndex(([y, h]) => py >= y - 1 && py <= y + h + 1);
    if (track < 0 || px < GUTTER) return null;
    let best = -1;
    for (let i = 0; i < view.n; i++) if (view.row[i] === track && x(view.start[i]) - 2 <= px && x(view.end[i]) + 2 >= px && (best < 0 || view.merged[best] > view.merged[i] || (view.merged[best] === view.merged[i] && view.end[i] - view.start[i] < view.end[best] - view.start[best]))) best = i;
    return { track, best };
  }
  const place = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  canvas.onpointerdown = (e) => { const [px, py] = place(e); root.focus({ preventScroll: true }); canvas.setPointerCapture(e.pointerId); drag = { x0: px, x1: px, y: py, lo, hi, zooming: e.shiftKey || py < AXIS, moved: false }; };
  canvas.onpointermove = (e) => {
    const [px, py] = place(e);
    if (drag) {
      drag.x1 = px; drag.moved ||= Math.abs(px - drag.x0) > 3; tip.style.display = "none";
      if (drag.zooming) draw();
      else if (drag.moved) { const by = ((drag.x0 - px) / plot()) * (drag.hi - drag.lo); go(drag.lo + by, drag.hi + by); }
      return;
    }
    hover = under(px, py);
    const i = hover?.best ?? -1, flag = view.flags.find(([ns, dur, track]) => track === hover?.track && ns <= time(px) && ns + dur >= time(px));
    if (i < 0) { tip.style.display = "none"; return; }
    const length = said(view.end[i] - view.start[i]);
    tip.textContent = view.merged[i] ? `${view.count[i].toLocaleString("en")} events begin in ${length}, busy ${Math.round((100 * view.share[i]) / 255)} %${view.hit[i] ? `, ${view.hit[i]} found` : ""}` : flag ? `⚑ ${flag[3]}, ${length}` : `${view.names[view.name[i]]}, ${length}`;
    tip.style.display = "block";
    const r = root.getBoundingClientRect();
    tip.style.left = `${Math.min(e.clientX - r.left + 12, r.width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${e.clientY - r.top + 14}px`;
  };
  canvas.onpointerleave = () => { tip.style.display = "none"; };
  canvas.onpointerup = (e) => {
    const was = drag; drag = null;
    const [px, py] = place(e);
    if (was?.moved && was.zooming) return go(...[time(was.x0), time(px)].sort((a, b) => a - b));
    if (was?.moved) return;
    const found = under(px, py);
    if (found) model.send({ do: "pick", track: found.track, at: Math.round(time(px)), slack: Math.round((2 * (hi - lo)) / plot()) });
    draw();
  };
  canvas.ondblclick = (e) => zoom(0.25, time(place(e)[0]));
  canvas.addEventListener("wheel", (e) => {
    if (!(e.ctrlKey || e.metaKey || e.altKey)) return; // a bare wheel scrolls the notebook
    e.preventDefault();
    zoom(Math.exp(e.deltaY * 0.0025), time(place(e)[0]));
  }, { passive: false });
  root.addEventListener("keydown", (e) => {
    e.stopPropagation(); // a notebook's own keys: "a" would add a cell
    if (e.target === box) { if (e.key === "Enter") model.send({ do: "next", way: e.shiftKey ? -1 : 1 }); return; }
    const by = (hi - lo) / 5, act = { w: () => zoom(0.6, middle()), s: () => zoom(1 / 0.6, middle()), a: () => go(lo - by, hi - by), d: () => go(lo + by, hi + by), ArrowLeft: () => go(lo - by, hi - by), ArrowRight: () => go(lo + by, hi + by), "+": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()) }[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  let typing = 0;
  box.oninput = () => { clearTimeout(typing); typing = setTimeout(() => model.send({ do: "search", text: box.value }), 250); };

  const seen = new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now < 250 || now === width) return;
    width = now; draw(); tell(); ask();
  });
  seen.observe(scroll);
  return () => seen.disconnect();
}

export default { render };
