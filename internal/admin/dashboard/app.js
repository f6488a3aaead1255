// The dashboard of kvgate: one model of what the gateway tells over /debug/live, drawn again once a second. Text from
// outside goes into the page as text only.

const $ = (id) => document.getElementById(id);
const base = new URL("..", location.href);
const url = (path) => new URL(path, base);

// h makes an element: h("td", {class: "num"}, "text", child…).
function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (v == null || v === false) continue;
    if (k.startsWith("on")) el.addEventListener(k.slice(2), v);
    else if (k === "style") Object.assign(el.style, v);
    else el.setAttribute(k, v === true ? "" : v);
  }
  for (const c of children.flat(Infinity)) if (c != null && c !== false) el.append(c);
  return el;
}
const svg = (tag, props, ...children) => {
  const el = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(props || {})) el.setAttribute(k, v);
  el.append(...children);
  return el;
};
// setText and setClass touch the page only when something changed.
const setText = (el, t) => { if (el.lastText !== t) { el.textContent = t; el.lastText = t; } };
const setClass = (el, c) => { if (el.lastClass !== c) { el.className = c; el.lastClass = c; } };

// ---- Numbers for people. Unknown is a dash, never 0.
const unknown = "–";
const trim = (v, digits) => v.toFixed(digits);
function count(v) {
  if (v == null) return unknown;
  const a = Math.abs(v);
  if (a < 1000) return Number.isInteger(v) ? String(v) : trim(v, a < 10 ? 1 : 0);
  if (a < 1e6) return trim(v / 1e3, a < 1e4 ? 1 : 0) + "k";
  if (a < 1e9) return trim(v / 1e6, a < 1e7 ? 1 : 0) + "M";
  return trim(v / 1e9, 1) + "G";
}
function seconds(v) {
  if (v == null) return unknown;
  if (v === 0) return "0 ms";
  if (v < 0.001) return Math.max(1, Math.round(v * 1e6)) + " µs";
  if (v < 0.01) return trim(v * 1e3, 1) + " ms";
  if (v < 1) return Math.round(v * 1e3) + " ms";
  if (v < 10) return trim(v, 2) + " s";
  if (v < 100) return trim(v, 1) + " s";
  if (v < 7200) return Math.round(v / 60) + " min";
  if (v < 172800) return trim(v / 3600, 1) + " h";
  return Math.round(v / 86400) + " d";
}
const percent = (v, digits = 0) => v == null ? unknown : (v > 0 && v < 0.01 && digits === 0 ? "<1 %" : trim(v * 100, digits) + " %");
const times = (v) => v == null ? unknown : trim(v, v < 10 ? 2 : 1) + "×";
const clock = (iso) => new Date(iso).toLocaleTimeString([], { hour12: false });
const plural = (n, word) => n + " " + word + (n === 1 ? "" : "s");
const level = (kv) => kv == null ? "" : kv >= 0.95 ? "bad" : kv >= 0.8 ? "warn" : "";
const shortID = (id, pool) => pool && id.startsWith(pool + "/") ? id.slice(pool.length + 1) : id;

// ---- What is known.
const state = {
  gateway: null, pools: [], endpoints: [], ages: [], history: [], requests: [], waiting: null,
  at: 0, paused: false, connected: false, lostAt: null,
  filter: "", chip: "all", pool: "", sort: { key: "id", up: true }, requestChip: "all",
  detail: null, cursor: null,
};
const keptRequests = 200;
const keptHistory = 300;

function take(m) {
  state.at = Date.parse(m.at);
  state.gateway = m.gateway;
  state.pools = m.pools;
  state.figures = m.figures;
  state.ages = m.ages;
  state.waiting = m.waiting || null;
  if (m.whole) {
    state.endpoints = m.endpoints || [];
    state.history = m.history;
    state.requests = m.requests.slice().reverse();
    order = null;
  } else {
    for (const [i, row] of m.changed || []) state.endpoints[i] = row;
    state.history = state.history.concat(m.history).slice(-keptHistory);
    if (m.requests.length) state.requests = m.requests.slice().reverse().concat(state.requests).slice(0, keptRequests);
  }
}

// ---- The stream.
let source;
let queued = false;
function connect() {
  source = new EventSource(url("debug/live"));
  source.onopen = () => { state.connected = true; state.lostAt = null; draw(); };
  source.onmessage = (e) => {
    take(JSON.parse(e.data));
    if (!state.paused) draw();
  };
  source.onerror = () => {
    if (state.connected || !state.lostAt) state.lostAt = new Date();
    state.connected = false;
    draw();
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // refused outright: EventSource gives up then
  };
}
function draw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    drawHeader();
    if (!state.gateway) return;
    drawFigures(); drawPools(); drawWaiting(); drawChips(); drawEndpoints(); drawMap(); drawRequests();
  });
}

// ---- Header.
function drawHeader() {
  const g = state.gateway, dot = $("status").firstElementChild;
  const banner = $("banner");
  if (!state.connected && (g || state.lostAt)) {
    banner.hidden = false;
    banner.className = "banner bad";
    setText(banner, "No connection to the gateway since " + clock(state.lostAt || new Date()) + ". What is shown is from then; trying again.");
  } else banner.hidden = true;
  document.body.classList.toggle("stale", !state.connected && !!g);
  if (!g) return;
  const missing = g.missing.length > 0;
  setClass(dot, "dot " + (!state.connected ? "" : missing ? "bad" : "good"));
  setText($("status-text"), !state.connected ? "not connected" : missing ? "not ready: " + g.missing.join("; ") : "ready");
  $("status-text").title = g.missing.join("\n");
  setText($("facts"), [g.version, "up " + seconds((state.at - Date.parse(g.started_at)) / 1000), plural(state.pools.length, "pool"),
    plural(state.endpoints.length, "endpoint"), plural(g.names, "model"), count(g.requests) + " requests"].join("  ·  "));
  $("actions-button").hidden = !g.actions;
}

// ---- Figures.
const figures = [
  { key: "rps", name: "Requests", spark: (p) => p[1] },
  { key: "ttft", name: "Time to first token", spark: (p) => p[3], second: (p) => p[4] },
  { key: "out", name: "Output", spark: (p) => p[5] },
  { key: "errors", name: "Failed", spark: (p) => p[2], error: true },
  { key: "flight", name: "In flight" },
  { key: "kv", name: "KV cache in use" },
  { key: "hits", name: "Prefix hits" },
  { key: "adapters", name: "Adapter hits" },
];
const figureNodes = {};
function buildFigures() {
  for (const f of figures) {
    const n = figureNodes[f.key] = { value: h("div", { class: "value" }), more: h("div", { class: "more" }) };
    const box = h("div", { class: "figure", role: "group", "aria-label": f.name }, h("div", { class: "name" }, f.name), n.value, n.more);
    if (f.spark) {
      n.area = svg("path", { class: "spark-area" });
      n.second = svg("path", { class: "spark second" });
      n.line = svg("path", { class: "spark" + (f.error ? " error" : "") });
      box.append(svg("svg", { viewBox: "0 0 300 26", preserveAspectRatio: "none", "aria-hidden": "true" }, n.area, n.second, n.line));
    } else if (f.key === "kv") {
      n.bar = h("i");
      box.append(h("div", { class: "meter", "aria-hidden": "true", style: { marginTop: "9px" } }, h("span", { class: "track" }, n.bar)));
    }
    $("figures").append(box);
  }
}
function figure(key, value, unit, more) {
  const n = figureNodes[key], text = value + "|" + unit;
  if (n.text !== text) {
    n.text = text;
    n.value.replaceChildren(value, " ", h("small", {}, unit));
  }
  setText(n.more, more);
  n.more.title = more;
}
// path draws points over the last five minutes, the newest at the right; gaps stay gaps.
function path(points, get, top, area) {
  const now = Math.floor(state.at / 1000), span = Math.max(60, Math.min(keptHistory, now - (points[0]?.[0] ?? now)));
  let d = "", open = false, x = 0;
  for (const p of points) {
    const v = get(p);
    if (v == null) {
      if (area && open) d += `L${x} 26Z`;
      open = false;
      continue;
    }
    x = (300 - (now - p[0]) * 300 / span).toFixed(1);
    const y = (24.5 - 23 * Math.min(1, v / top)).toFixed(1);
    if (!open) { d += area ? `M${x} 26L${x} ${y}` : `M${x} ${y}`; } else d += `L${x} ${y}`;
    open = true;
  }
  if (area && open) d += `L${x} 26Z`;
  return d;
}
// smooth is a running mean, so that a line over seconds is not a comb.
function smooth(points, get, n = 5) {
  return points.map((p, i) => {
    let sum = 0, k = 0;
    for (let j = Math.max(0, i - n + 1); j <= i; j++) { const v = get(points[j]); if (v != null) { sum += v; k++; } }
    return [p[0], k ? sum / k : null];
  });
}
function drawFigures() {
  const all = state.figures;
  let kvUsed = 0, kvCap = 0, free = 0, flight = 0, waiting = 0, foreign = 0;
  for (const e of state.endpoints) {
    if (e.kv_cache_utilization != null && e.kv_capacity_tokens) { kvUsed += e.kv_cache_utilization * e.kv_capacity_tokens; kvCap += e.kv_capacity_tokens; }
    free += e.kv_headroom_tokens || 0;
    flight += e.booked_requests;
    waiting += e.waiting || 0;
    foreign += e.foreign_requests || 0;
  }
  const [t50, u50] = split(seconds(all.ttft_p50_seconds)), errors = all.error_ratio;
  // Of streams that nobody asked for their usage nothing is known, nor of those that run before they end.
  const told = all.output_tokens_per_second != null && (all.output_tokens_per_second > 0 || !state.gateway.in_flight);
  figure("rps", count(all.requests_per_second), "/s", told ? count(all.input_tokens_per_second) + " prompt tokens/s" : "prompt tokens not reported");
  figure("ttft", t50, u50 + " p50", "p99 " + seconds(all.ttft_p99_seconds));
  figure("out", told ? count(all.output_tokens_per_second) : unknown, "tokens/s", told ? "as servers count" : "not reported");
  figure("errors", errors == null ? unknown : split(percent(errors, errors > 0 && errors < 0.1 ? 1 : 0))[0], errors == null ? "" : "%", "in the last minute");
  setClass(figureNodes.errors.value, "value" + (errors > 0.01 ? " bad" : ""));
  const held = (state.waiting || []).reduce((n, r) => n + (r.waiting || 0), 0); // for admission
  figure("flight", count(state.gateway.in_flight), "requests", held > 0
    ? `${count(held)} held here, ${count(waiting)} queued there` : `${count(waiting)} queued, ${count(foreign)} foreign`);
  const kv = kvCap ? kvUsed / kvCap : null;
  figure("kv", kv == null ? unknown : Math.round(kv * 100), kv == null ? "" : "%", kvCap ? count(free) + " tokens free" : "no endpoint tells");
  figureNodes.kv.bar.style.width = (kv || 0) * 100 + "%";
  setClass(figureNodes.kv.bar, level(kv));
  const whole = (v) => v == null ? unknown : Math.round(v * 100), sign = (v) => v == null ? "" : "%";
  figure("hits", whole(all.prefix_hit_ratio), sign(all.prefix_hit_ratio), "of prompt tokens");
  figure("adapters", whole(all.adapter_hit_ratio), sign(all.adapter_hit_ratio), all.adapter_hit_ratio == null ? "no adapter asked for" : "sent where loaded");
  for (const f of figures) {
    if (!f.spark) continue;
    const n = figureNodes[f.key], line = smooth(state.history, f.spark), second = f.second ? smooth(state.history, f.second) : null;
    let top = f.error ? 1 : 1e-9;
    for (const p of second || line) if (p[1] > top) top = p[1];
    if (f.error) n.line.setAttribute("class", "spark " + (line.some((p) => p[1] > 0) ? "error" : "second"));
    n.line.setAttribute("d", path(line, (p) => p[1], top));
    n.area.setAttribute("d", f.second || f.error ? "" : path(line, (p) => p[1], top, true));
    n.second.setAttribute("d", second ? path(second, (p) => p[1], top) : "");
  }
}
const split = (text) => { const i = text.lastIndexOf(" "); return i < 0 ? [text, ""] : [text.slice(0, i), text.slice(i + 1)]; };

// ---- Tables. A column is {key, name, title, class, sort(row) → number or text, cell(td, row)}.
function head(table, columns, sort) {
  const tr = h("tr");
  for (const c of columns) {
    const th = h("th", { scope: "col", class: c.class, title: c.title });
    if (sort && c.sort) {
      th.append(h("button", { type: "button", onclick: () => { sort(c); } }, c.name));
      c.th = th;
    } else th.append(c.name);
    tr.append(th);
  }
  table.tHead.replaceChildren(tr);
}
const number = (td, v, text) => { setText(td, text === undefined ? count(v) : text); td.classList.toggle("zero", !v); };
function meter(td, kv, title) {
  if (!td.meter) {
    td.meter = { bar: h("i"), label: h("span", { class: "label" }) };
    td.append(h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, td.meter.bar), td.meter.label));
  }
  const w = (kv == null ? 0 : Math.min(1, kv) * 100).toFixed(1) + "%";
  if (td.meter.w !== w) { td.meter.w = w; td.meter.bar.style.width = w; }
  setClass(td.meter.bar, level(kv));
  setText(td.meter.label, percent(kv));
  if (td.title !== title) td.title = title;
}

// ---- Pools.
const poolColumns = [
  { name: "Pool", cell: (td, p) => setText(td, p.name) },
  { name: "Policy", class: "wide", cell: (td, p) => { setText(td, p.policy || unknown); td.classList.add("muted"); } },
  { name: "Up", class: "num", title: "Endpoints that get requests", cell: (td, p) => { setText(td, `${p.up} of ${p.all}`); td.classList.toggle("bad", p.up === 0); td.classList.toggle("warn", p.up > 0 && p.up < p.all); } },
  { name: "KV cache", title: "In use over all endpoints that tell", cell: (td, p) => meter(td, p.kv, "") },
  { name: "Headroom", class: "num wide", title: "Free KV tokens after bookings and foreign load", cell: (td, p) => setText(td, p.kv == null ? unknown : count(p.free)) },
  { name: "Requests/s", class: "num", cell: (td, p) => number(td, p.requests_per_second) },
  { name: "Failed", class: "num wide", cell: (td, p) => { number(td, p.error_ratio, p.error_ratio == null ? unknown : percent(p.error_ratio, p.error_ratio > 0 && p.error_ratio < .1 ? 1 : 0)); td.classList.toggle("bad", p.error_ratio > 0.01); } },
  { name: "TTFT p50", class: "num", title: "Time to first token, median of the last minute", cell: (td, p) => setText(td, seconds(p.ttft_p50_seconds)) },
  { name: "p99", class: "num", cell: (td, p) => setText(td, seconds(p.ttft_p99_seconds)) },
  { name: "Output tok/s", class: "num wide", cell: (td, p) => number(td, p.output_tokens_per_second) },
  { name: "Prefix hits", class: "num wide", title: "Share of prompt tokens that the servers had cached", cell: (td, p) => setText(td, percent(p.prefix_hit_ratio)) },
  { name: "Adapter hits", class: "num wide", title: "Requests for adapters sent where the adapter was believed to be loaded", cell: (td, p) => setText(td, percent(p.adapter_hit_ratio)) },
  { name: "TTFT/predicted", class: "num wide", title: "Median of actual over predicted time to first token", cell: (td, p) => setText(td, times(p.prediction_ratio)) },
  { name: "Models", class: "wide", cell: (td, p) => { setText(td, (p.models.length > 1 ? p.models[0] + " and " + (p.models.length - 1) + " more" : p.models[0] || unknown) + (p.adapters ? ", " + p.adapters + (p.adapters > 1 ? " adapters" : " adapter") : "")); td.classList.add("muted"); td.title = p.models.join("\n"); } },
];
function drawPools() {
  const rows = state.pools.map((p) => ({ ...p, up: 0, all: 0, free: 0, used: 0, cap: 0, kv: null }));
  const by = new Map(rows.map((p) => [p.name, p]));
  for (const e of state.endpoints) {
    const p = by.get(e.pool);
    if (!p) continue;
    p.all++;
    if (e.healthy) p.up++;
    p.free += e.kv_headroom_tokens || 0;
    if (e.kv_cache_utilization != null && e.kv_capacity_tokens) { p.used += e.kv_cache_utilization * e.kv_capacity_tokens; p.cap += e.kv_capacity_tokens; }
  }
  for (const p of rows) if (p.cap) p.kv = p.used / p.cap;
  const body = $("pools").tBodies[0];
  rows.forEach((p, i) => {
    const tr = body.rows[i] || body.appendChild(row(poolColumns, (tr) => choosePool(tr.data.name)));
    fill(tr, poolColumns, p);
    tr.classList.toggle("selected", state.pool === p.name);
    tr.setAttribute("aria-selected", state.pool === p.name);
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}
function choosePool(name) {
  state.pool = state.pool === name ? "" : name;
  order = null;
  draw();
}
function row(columns, open) {
  const tr = h("tr", { tabindex: 0 });
  for (const c of columns) tr.append(h("td", { class: c.class }));
  tr.addEventListener("click", () => { if (!getSelection().toString()) open(tr); });
  tr.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); open(tr); } });
  return tr;
}
function fill(tr, columns, data) {
  tr.data = data;
  for (let i = 0; i < columns.length; i++) columns[i].cell(tr.cells[i], data);
}

// ---- Requests that wait for admission, by pool and class, and whose they are.
function drawWaiting() {
  const rows = state.waiting || [];
  $("waiting-panel").hidden = rows.length === 0;
  if (!rows.length) return;
  const tenants = rows.some((r) => r.tenants), num = ["Waiting", "Tokens", "Refused"];
  $("waiting").tHead.replaceChildren(h("tr", {}, ["Pool", "Class", ...num, ...(tenants ? ["Tenants"] : [])].map((k) =>
    h("th", { scope: "col", class: num.includes(k) ? "num" : null }, k))));
  $("waiting").tBodies[0].replaceChildren(...rows.slice(0, 50).map((r) => h("tr", {},
    h("td", {}, r.pool), h("td", {}, r.class), [r.waiting, r.tokens, r.refused].map((n) => h("td", { class: "num" }, count(n))),
    tenants ? h("td", {}, tenantsText(r.tenants || [])) : null)));
}
// Whose requests wait, most first: "team-a 12, team-b 3, 4 others 9".
function tenantsText(tenants) {
  return tenants.map((t) => `${t.others ? t.others + " others" : t.tenant || "nobody in particular"} ${count(t.waiting)}`).join(", ") || "\u2013";
}

// ---- Endpoints.
const stateOf = (e) => e.state.join(", ");
const needsAttention = (e) => !e.healthy || e.error || e.state.some((s) => s === "busy" || s === "unmeasured") || e.kv_cache_utilization >= 0.95 || e.waiting > 0;
const chips = {
  all: ["All", () => true],
  attention: ["Attention", needsAttention],
  busy: ["Working", (e) => e.booked_requests > 0 || e.running > 0],
  idle: ["Idle", (e) => e.healthy && e.booked_requests === 0 && !e.running],
};
const endpointColumns = [
  { key: "id", name: "Endpoint", sort: (e) => e.id, cell: (td, e) => {
    if (!td.dot) { td.dot = h("span", { class: "dot", "aria-hidden": "true" }); td.name = h("span", {}); td.append(td.dot, td.name); }
    setClass(td.dot, "dot " + (e.healthy ? e.error || needsAttention(e) ? "warn" : "good" : e.state[0] === "unknown" ? "" : "bad"));
    setText(td.name, state.pools.length > 1 ? e.id : shortID(e.id, e.pool));
    td.title = e.url + (e.error ? "\n" + e.error : "");
  } },
  { key: "state", name: "State", sort: (e) => stateOf(e), cell: (td, e) => { setText(td, stateOf(e)); td.classList.toggle("bad", !e.healthy); td.classList.toggle("muted", e.healthy); } },
  { key: "kv", name: "KV cache", title: "Share of the KV cache in use at the last scrape", sort: (e) => e.kv_cache_utilization ?? -1,
    cell: (td, e) => { td.style.minWidth = "110px"; meter(td, e.kv_cache_utilization, e.kv_capacity_tokens ? count(e.kv_capacity_tokens) + " tokens" : "size unknown"); } },
  { key: "free", name: "Headroom", class: "num", title: "Free KV tokens after bookings and foreign load", sort: (e) => e.kv_headroom_tokens ?? -1, cell: (td, e) => { setText(td, count(e.kv_headroom_tokens)); } },
  { key: "pending", name: "Pending", class: "num", title: "Uncached prompt tokens of our requests that have not reached their first token", sort: (e) => e.pending_tokens, cell: (td, e) => number(td, e.pending_tokens) },
  { key: "ours", name: "Ours", class: "num", title: "Requests that this gateway has there", sort: (e) => e.booked_requests, cell: (td, e) => number(td, e.booked_requests) },
  { key: "running", name: "Running", class: "num wide", title: "In the server's batch at the last scrape", sort: (e) => e.running ?? -1, cell: (td, e) => number(td, e.running) },
  { key: "waiting", name: "Waiting", class: "num", title: "Queued in the server at the last scrape", sort: (e) => e.waiting ?? -1, cell: (td, e) => { number(td, e.waiting); td.classList.toggle("warn", e.waiting > 0); } },
  { key: "foreign", name: "Foreign", class: "num wide", title: "Requests there that this gateway did not send", sort: (e) => e.foreign_requests ?? -1, cell: (td, e) => number(td, e.foreign_requests) },
  { key: "adapters", name: "Adapters", class: "num wide adapters", title: "Believed to be loaded, and places for them in one batch", sort: (e) => adapters(e), cell: (td, e) => {
    number(td, adapters(e), (e.max_adapters == null ? String(adapters(e) || unknown) : adapters(e) + "/" + e.max_adapters)); td.title = (e.adapters || []).map((a) => a.name).join("\n"); } },
  { key: "engines", name: "Engines", class: "num wide engines", title: "Data-parallel engines behind this URL", sort: (e) => engines(e), cell: (td, e) => number(td, engines(e) - 1, String(engines(e))) },
  { key: "age", name: "Scraped", class: "num", title: "Age of what is known", sort: (e) => state.ages[e.index] ?? -1, cell: (td, e) => {
    const a = state.ages[e.index]; setText(td, a == null || a < 0 ? "never" : a < 100 ? trim(a / 10, 1) + " s" : seconds(a / 10)); td.classList.toggle("warn", a >= 100 || a < 0); } },
];
const adapters = (e) => (e.adapters || []).length + (e.more_adapters || 0);
const engines = (e) => (e.engines || []).length || 1;
const rowHeight = 28, overscan = 8;
let order = null; // indexes of the endpoints shown, sorted; null: to be made
let hovered = false;

function matches(e) {
  if (state.pool && e.pool !== state.pool || !chips[state.chip][1](e)) return false;
  if (!state.filter) return true;
  const text = (e.id + " " + e.url + " " + e.state.join(" ") + " " + (e.dialect || "") + " " + (e.adapters || []).map((a) => a.name).join(" ")).toLowerCase();
  return state.filter.split(/\s+/).every((w) => text.includes(w));
}
function sortEndpoints() {
  // Rows do not move under somebody's pointer or cursor.
  if (order && (hovered || $("endpoints").contains(document.activeElement)) && order.every((i) => i < state.endpoints.length)) return;
  const column = endpointColumns.find((c) => c.key === state.sort.key), sign = state.sort.up ? 1 : -1;
  state.endpoints.forEach((e, i) => { e.index = i; });
  order = [];
  state.endpoints.forEach((e, i) => { if (matches(e)) order.push(i); });
  const keys = new Map(order.map((i) => [i, column.sort(state.endpoints[i])]));
  order.sort((a, b) => {
    const x = keys.get(a), y = keys.get(b);
    const c = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return c * sign || a - b;
  });
}
function drawEndpoints() {
  state.endpoints.forEach((e, i) => { e.index = i; });
  sortEndpoints();
  for (const c of endpointColumns) {
    if (c.key === state.sort.key) c.th.setAttribute("aria-sort", state.sort.up ? "ascending" : "descending");
    else c.th.removeAttribute("aria-sort");
  }
  const table = $("endpoints"), box = $("endpoints-scroll"), body = table.tBodies[0];
  table.classList.toggle("no-engines", !state.endpoints.some((e) => e.engines));
  table.classList.toggle("no-adapters", !state.endpoints.some((e) => e.adapters || e.max_adapters));
  table.setAttribute("aria-rowcount", order.length + 1);
  const first = Math.max(0, Math.floor(box.scrollTop / rowHeight) - overscan);
  const shown = Math.ceil(box.clientHeight / rowHeight) + 2 * overscan;
  const last = Math.min(order.length, first + shown);
  const top = first * rowHeight, bottom = (order.length - last) * rowHeight;
  const focused = body.contains(document.activeElement) ? document.activeElement.data?.id : null;
  if (!body.top) {
    const spacer = () => { const td = h("td", { colspan: endpointColumns.length }); return h("tr", { class: "spacer", "aria-hidden": "true" }, td); };
    body.top = spacer(); body.bottom = spacer(); body.pool = [];
    body.append(body.top, body.bottom);
  }
  body.top.firstElementChild.style.height = top + "px";
  body.bottom.firstElementChild.style.height = bottom + "px";
  body.top.hidden = top === 0; body.bottom.hidden = bottom === 0;
  while (body.pool.length < last - first) {
    const tr = row(endpointColumns, (tr) => openEndpoint(tr.data.id));
    tr.addEventListener("focus", () => { state.cursor = tr.data.id; });
    body.pool.push(tr);
    body.insertBefore(tr, body.bottom);
  }
  while (body.pool.length > last - first) body.pool.pop().remove();
  for (let i = first; i < last; i++) {
    const tr = body.pool[i - first], e = state.endpoints[order[i]];
    fill(tr, endpointColumns, e);
    tr.setAttribute("aria-rowindex", i + 2);
    tr.tabIndex = (state.cursor ? e.id === state.cursor : i === 0) || last - first > 0 && i === first && !order.some((j) => state.endpoints[j].id === state.cursor) ? 0 : -1;
    tr.classList.toggle("selected", state.detail?.kind === "endpoint" && state.detail.id === e.id);
  }
  if (focused && document.activeElement.data?.id !== focused) body.pool.find((tr) => tr.data.id === focused)?.focus({ preventScroll: true });
  const empty = $("endpoints-empty");
  empty.hidden = order.length > 0;
  if (order.length === 0) {
    setText(empty, state.endpoints.length === 0
      ? "No endpoint is known.\n" + (state.gateway.missing.filter((m) => m !== "no endpoint is known").join("\n") || "Discovery has found none yet.") + "\nkvgate endpoints tells how each source is doing."
      : "No endpoint matches. " + (state.filter || state.chip !== "all" || state.pool ? "Clear the filter to see all " + state.endpoints.length + "." : ""));
  }
}
function moveCursor(e) {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 };
  if (!(e.key in steps) || !e.target.data) return;
  e.preventDefault();
  const at = order.findIndex((i) => state.endpoints[i].id === e.target.data.id);
  const to = Math.max(0, Math.min(order.length - 1, at + steps[e.key]));
  state.cursor = state.endpoints[order[to]].id;
  const box = $("endpoints-scroll"), y = to * rowHeight, headHeight = rowHeight;
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + rowHeight + headHeight > box.scrollTop + box.clientHeight) box.scrollTop = y + rowHeight + headHeight - box.clientHeight;
  drawEndpoints();
  $("endpoints").tBodies[0].pool.find((tr) => tr.data.id === state.cursor)?.focus({ preventScroll: true });
}
function chipButtons(box, all, current, choose) {
  if (!box.buttons) {
    box.buttons = {};
    for (const key of Object.keys(all)) {
      const n = h("span", { class: "count" });
      box.buttons[key] = { n, b: h("button", { type: "button", onclick: () => choose(key) }, all[key][0], n) };
      box.append(box.buttons[key].b);
    }
  }
  for (const key of Object.keys(all)) box.buttons[key].b.setAttribute("aria-pressed", key === current);
}
function drawChips() {
  chipButtons($("chips"), chips, state.chip, (key) => { state.chip = key; order = null; $("endpoints-scroll").scrollTop = 0; draw(); });
  const inPool = state.endpoints.filter((e) => !state.pool || e.pool === state.pool);
  for (const key of Object.keys(chips)) setText($("chips").buttons[key].n, String(inPool.filter(chips[key][1]).length));
  chipButtons($("request-chips"), requestChips, state.requestChip, (key) => { state.requestChip = key; draw(); });
}

// ---- The map: one square per endpoint, for fleets that a table does not show at a glance.
const mapFrom = 40;
let mapCells = null;
function drawMap() {
  const canvas = $("map"), on = state.endpoints.length >= mapFrom;
  canvas.hidden = !on; $("map-key").hidden = !on;
  if (!on) return;
  const width = canvas.parentElement.clientWidth - 24, size = state.endpoints.length > 400 ? 9 : 13, gap = 2, step = size + gap;
  const columns = Math.max(1, Math.floor((width + gap) / step)), lines = Math.ceil(state.endpoints.length / columns), ratio = devicePixelRatio || 1;
  const height = lines * step;
  if (canvas.w !== width || canvas.h !== height || canvas.r !== ratio) {
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    Object.assign(canvas, { w: width, h: height, r: ratio });
  }
  mapCells = { columns, step };
  const css = getComputedStyle(document.documentElement), probe = drawMap.probe ||= document.body.appendChild(h("span", { hidden: true }));
  const color = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  const c = { fill: color("--accent"), warn: color("--warn-fill"), bad: color("--bad-fill"), line: color("--line-strong"), empty: color("--raised") };
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  state.endpoints.forEach((e, i) => {
    const x = (i % columns) * step, y = Math.floor(i / columns) * step, kv = e.kv_cache_utilization;
    g.globalAlpha = matches(e) ? 1 : 0.25;
    if (!e.healthy && e.state[0] !== "unknown") { g.fillStyle = c.bad; g.fillRect(x, y, size, size); return; }
    if (kv == null) { g.strokeStyle = c.line; g.strokeRect(x + .5, y + .5, size - 1, size - 1); return; }
    g.fillStyle = c.empty; g.fillRect(x, y, size, size);
    if (kv >= 0.8) { g.fillStyle = kv >= 0.95 ? c.bad : c.warn; g.fillRect(x, y, size, size); return; }
    g.globalAlpha *= 0.12 + 0.88 * kv;
    g.fillStyle = c.fill; g.fillRect(x, y, size, size);
  });
  g.globalAlpha = 1;
}
function cellAt(ev) {
  if (!mapCells) return null;
  const r = $("map").getBoundingClientRect(), x = Math.floor((ev.clientX - r.left) / mapCells.step), y = Math.floor((ev.clientY - r.top) / mapCells.step);
  return x < mapCells.columns ? state.endpoints[y * mapCells.columns + x] : null;
}

// ---- Requests.
const failed = (r) => r.outcome !== "ok" && r.outcome !== "client_gone";
const actualTTFT = (r) => r.answered_ttft_seconds ?? null;
const late = (r) => r.predicted_ttft_seconds != null && actualTTFT(r) > Math.max(0.5, 2 * r.predicted_ttft_seconds);
const requestChips = { all: ["All", () => true], failed: ["Failed", failed], retried: ["Retried", (r) => (r.attempts || []).length > 1], late: ["Later than predicted", late] };
// why is the decision in a few words.
function why(r) {
  if (!r.endpoint) return r.error || r.outcome;
  const words = [];
  if ((r.attempts || []).length > 1) words.push("attempt " + r.attempts.length);
  if (r.adapter) words.push(r.adapter_resident ? "adapter loaded" : "adapter to load");
  if (r.prompt_tokens && r.new_tokens != null) {
    const hit = 1 - r.new_tokens / r.prompt_tokens;
    if (hit > 0.02) words.push(percent(hit) + " cached");
  }
  if (r.runner_up && r.cost != null && r.runner_up_cost != null) {
    const by = Math.abs(r.runner_up_cost - r.cost);
    words.push(by < 1e-6 || by < 1 && r.cost > 10 ? "a tie" : by > 3e7 ? "only one free" : "ahead by " + (by < 10 ? trim(by, 2) : count(Math.round(by))));
  } else if (r.cost != null && !r.runner_up) words.push("only one");
  return words.join(", ") || unknown;
}
const requestColumns = [
  { name: "Ended", cell: (td, r) => { setText(td, clock(r.at)); td.classList.add("muted"); } },
  { name: "Model", class: "clip model", cell: (td, r) => { setText(td, r.model || r.path || unknown); td.title = r.model || ""; } },
  { name: "Endpoint", class: "clip where", cell: (td, r) => { setText(td, r.endpoint ? (state.pools.length > 1 ? r.endpoint : shortID(r.endpoint, r.pool)) : unknown); td.title = r.endpoint || ""; } },
  { name: "Outcome", cell: (td, r) => { setText(td, r.outcome === "ok" ? "ok" : r.outcome === "endpoint_status" ? "status " + r.status : r.outcome); td.classList.toggle("bad", failed(r)); td.classList.toggle("muted", !failed(r)); } },
  { name: "First token", class: "num", title: "Time to first token", cell: (td, r) => { setText(td, seconds(r.ttft_seconds)); td.classList.toggle("warn", late(r)); td.title = r.predicted_ttft_seconds == null ? "" : "predicted " + seconds(r.predicted_ttft_seconds) + " after sending"; } },
  { name: "Predicted", class: "num wide", title: "What was expected of the first token, from sending", cell: (td, r) => { setText(td, seconds(r.predicted_ttft_seconds)); td.classList.add("muted"); } },
  { name: "Total", class: "num", cell: (td, r) => setText(td, seconds(r.duration_seconds)) },
  { name: "In", class: "num wide", title: "Prompt tokens, as the server counted or as estimated", cell: (td, r) => setText(td, count(r.input_tokens ?? (r.prompt_tokens || null))) },
  { name: "Out", class: "num wide", title: "Output tokens", cell: (td, r) => setText(td, count(r.output_tokens)) },
  { name: "Why there", class: "clip why", cell: (td, r) => { const w = why(r); setText(td, w); td.title = w; td.classList.add("muted"); } },
];
let requestsHeld = false;
function drawRequests() {
  const list = state.requests.filter(requestChips[state.requestChip][1]).slice(0, 60);
  const body = $("requests").tBodies[0];
  for (const key of Object.keys(requestChips)) setText($("request-chips").buttons[key].n, key === "all" ? "" : String(state.requests.filter(requestChips[key][1]).length));
  const hold = requestsHeld || $("requests").contains(document.activeElement);
  if (hold && body.rows.length && drawRequests.chip === state.requestChip) {
    const newest = drawRequests.newest || 0, n = state.requests.filter((r) => r.number > newest).length;
    setText($("held"), n ? "held; " + (n >= keptRequests ? n + " or more" : n) + " newer" : "");
    for (const tr of body.rows) tr.classList.toggle("selected", state.detail?.kind === "request" && state.detail.id === tr.data.number);
    return;
  }
  setText($("held"), "");
  drawRequests.chip = state.requestChip;
  drawRequests.newest = state.requests[0]?.number;
  list.forEach((r, i) => {
    const tr = body.rows[i] || body.appendChild(row(requestColumns, (tr) => openRequest(tr.data.number)));
    if (tr.data !== r) fill(tr, requestColumns, r);
    tr.classList.toggle("selected", state.detail?.kind === "request" && state.detail.id === r.number);
  });
  while (body.rows.length > list.length) body.lastElementChild.remove();
  $("requests-empty").hidden = list.length > 0;
  $("requests-scroll").hidden = list.length === 0;
  if (!list.length) setText($("requests-empty"), state.requests.length ? "None of the last " + state.requests.length + " requests." : "No request has ended yet.\nThey show here as they do; open one to see why it went where it went.");
}

// ---- Detail: one endpoint or one request, at the side. The address names it, so that it can be shared and gone back to.
let detailTimer = null, opener = null;
function show(kind, id, title) {
  if (!state.detail) opener = document.activeElement;
  state.detail = { kind, id };
  const hash = "#" + kind + "=" + encodeURIComponent(id);
  if (location.hash !== hash) history.pushState(null, "", hash);
  $("detail").hidden = false;
  setText($("detail-title"), title);
  $("detail").scrollTop = 0;
  $("detail").focus({ preventScroll: true });
  clearInterval(detailTimer);
  draw();
}
function closeDetail(push = true) {
  if (!state.detail) return;
  const was = state.detail;
  state.detail = null;
  clearInterval(detailTimer);
  $("detail").hidden = true;
  if (push) history.pushState(null, "", location.pathname);
  // Rows may have moved meanwhile: back to the endpoint, not to the place where it was.
  if (was.kind === "endpoint" && state.gateway) {
    state.cursor = was.id;
    drawEndpoints();
    opener = $("endpoints").tBodies[0].pool?.find((tr) => tr.data.id === was.id) || opener;
  }
  if (opener?.isConnected) opener.focus({ preventScroll: true });
  draw();
}
function fromHash() {
  const m = /^#(endpoint|request)=(.+)$/.exec(location.hash);
  if (!m) return closeDetail(false);
  const id = decodeURIComponent(m[2]);
  if (m[1] === "endpoint") openEndpoint(id); else openRequest(Number(id));
}
async function ask(path) {
  const r = await fetch(url(path));
  const body = await r.json().catch(() => ({}));
  if (!r.ok) throw new Error(body.error || "status " + r.status);
  return body;
}
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter((p) => p && p[1] != null && p[1] !== "").map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));

function openEndpoint(id) {
  show("endpoint", id, id);
  const body = $("detail-body");
  body.replaceChildren();
  const top = h("div"), actions = h("div", { class: "buttons", style: { justifyContent: "flex-start" } }), result = h("p", { role: "status" });
  const list = h("table", { "aria-label": "Its last decisions" }, h("thead"), h("tbody"));
  head(list, detailRequestColumns);
  const note = h("p", { class: "note" });
  body.append(top, actions, result, h("h3", {}, "Its last decisions"), h("div", { class: "scroll" }, list), note);
  const drawTop = () => {
    const e = state.endpoints.find((e) => e.id === id);
    if (!e) { top.replaceChildren(h("p", { class: "lead bad" }, "This endpoint is not in the table any more.")); actions.replaceChildren(); return; }
    const age = state.ages[e.index], kv = h("div");
    meter(kv, e.kv_cache_utilization, "");
    const parts = [
      h("p", { class: "lead" }, h("span", { class: "dot " + (e.healthy ? "good" : "bad"), style: { display: "inline-block", marginRight: "8px" } }), stateOf(e), " ", h("span", { class: "muted mono" }, e.url)),
      e.error && h("p", { class: "error" }, "Last scrape: " + e.error),
      facts([["KV cache", kv], ["Headroom", e.kv_headroom_tokens == null ? null : count(e.kv_headroom_tokens) + " of " + count(e.kv_capacity_tokens) + " tokens"],
        ["Pending", count(e.pending_tokens) + " tokens"], ["Booked", count(e.booked_kv_tokens) + " KV tokens"],
        ["Ours", plural(e.booked_requests, "request")], ["Foreign", e.foreign_requests == null ? unknown : plural(e.foreign_requests, "request")],
        ["Running", count(e.running)], ["Waiting", count(e.waiting)],
        ["Prefill", e.prefill_tokens_per_second ? count(e.prefill_tokens_per_second) + " tokens/s learned" : "not learned yet"], ["Scraped", age < 0 ? "never" : seconds(age / 10) + " ago"],
        ["Server", e.dialect || unknown], ["Pool", e.pool]]),
    ];
    if (adapters(e) || e.max_adapters != null) {
      parts.push(h("h3", {}, "Adapters" + (e.max_adapters == null ? "" : ", " + e.max_adapters + " fit into a batch")),
        h("div", { class: "tags" }, (e.adapters || []).map((a) => h("span", { class: "tag" + (a.in_flight ? " on" : ""), title: a.in_flight ? plural(a.in_flight, "request") + " in flight" : "idle" }, a.name + (a.in_flight ? " · " + a.in_flight : ""))),
          e.more_adapters ? h("span", { class: "muted" }, "and " + e.more_adapters + " more") : adapters(e) ? null : h("span", { class: "muted" }, "none seen yet")));
    }
    if (e.engines) {
      parts.push(h("h3", {}, "Engines"), h("table", { "aria-label": "Engines" }, h("thead", {}, h("tr", {}, ["Engine", "KV cache", "Running", "Waiting"].map((t, i) => h("th", { scope: "col", class: i > 1 ? "num" : null }, t)))),
        h("tbody", {}, e.engines.map((g) => { const td = h("td"); meter(td, g.kv_cache_utilization, ""); return h("tr", {}, h("td", {}, g.id), td, h("td", { class: "num" }, count(g.running)), h("td", { class: "num" }, count(g.waiting))); }))));
    }
    top.replaceChildren(...parts.filter(Boolean));
    if (state.gateway.actions && !actions.childElementCount) {
      const act = (path, doing) => async () => {
        const r = await action(path + "?endpoint=" + encodeURIComponent(id));
        if (r) setText(result, r.error ? "Refused: " + r.error : r.changed ? doing : "It was so already.");
        result.className = r?.error ? "error" : "note";
      };
      actions.append(h("button", { type: "button", onclick: act("-/drain", "Drained: it gets no new requests.") }, "Drain"), h("button", { type: "button", onclick: act("-/readmit", "Re-admitted.") }, "Re-admit"));
    }
  };
  const drawList = async () => {
    try {
      const d = await ask("debug/decisions?n=50&endpoint=" + encodeURIComponent(id));
      if (state.detail?.kind !== "endpoint" || state.detail.id !== id || list.contains(document.activeElement)) return;
      list.tBodies[0].replaceChildren(...d.decisions.map((r) => { const tr = row(detailRequestColumns, () => openRequest(r.number)); fill(tr, detailRequestColumns, r); return tr; }));
      setText(note, d.decisions.length ? "" : "None of the requests that are remembered went here.");
    } catch (err) { setText(note, "Not to be had: " + err.message); }
  };
  drawTop(); drawList();
  detailTimer = setInterval(() => { if (!state.paused) { drawTop(); drawList(); } }, 2000);
}
const detailRequestColumns = requestColumns.filter((c) => !["Endpoint", "Predicted", "In"].includes(c.name));

const termWords = { pending: "Pending", new: "New", kv: "KV", overflow: "Overflow", adapter: "Adapter", stale: "Stale", slow_start: "Slow start" };
const termTitles = { pending: "Prompt tokens ahead of it that have not reached their first token", new: "Its own tokens that are not cached there, times what they cost others", kv: "KV tokens in use, lightly", overflow: "Need beyond the KV space", adapter: "Loading the adapter, or taking a slot for it", stale: "Handicap: the load is unknown or too old", slow_start: "Handicap: it came back a moment ago" };
const termKeys = Object.keys(termWords);
async function openRequest(number) {
  show("request", number, "Request " + number);
  const body = $("detail-body");
  body.replaceChildren(h("p", { class: "note" }, "Reading…"));
  let r;
  try { r = await ask("debug/decisions/" + number); } catch (err) {
    body.replaceChildren(h("p", { class: "lead" }, "Not to be had: " + err.message));
    return;
  }
  if (state.detail?.kind !== "request" || state.detail.id !== number) return;
  setText($("detail-title"), (r.model || r.path || "Request") + (r.endpoint ? " → " + r.endpoint : ""));
  body.replaceChildren(...[
    h("p", { class: "lead" }, h("span", { class: failed(r) ? "bad" : "" }, r.outcome), " ", h("span", { class: "muted" }, "status " + r.status + ", " + clock(r.at) + ", " + seconds(r.duration_seconds) + (r.stream ? ", streamed" : ""))),
    r.error && h("p", { class: "error" }, r.error),
    ...timeline(r), ...prediction(r), ...decided(r), ...attempted(r),
    h("h3", {}, "Facts"),
    facts([["Request ID", h("span", { class: "mono" }, r.request_id || unknown)], ["Path", r.path], ["Pool", r.pool], ["Adapter", r.adapter],
      ["Prompt", r.prompt_tokens ? count(r.prompt_tokens) + " tokens estimated" : null], ["Cached", r.prompt_tokens && r.new_tokens != null ? count(r.prompt_tokens - r.new_tokens) + " tokens expected" : null],
      ["Input", r.input_tokens == null ? null : count(r.input_tokens) + " tokens" + (r.cached_tokens == null ? "" : ", " + count(r.cached_tokens) + " cached")],
      ["Output", r.output_tokens == null ? null : count(r.output_tokens) + " tokens"],
      ["Load was", r.scrape_age_seconds == null ? (r.endpoint ? "never scraped" : null) : seconds(r.scrape_age_seconds) + " old"], ["Snapshot", r.snapshot_version ? String(r.snapshot_version) : null],
      ["Gateway's part", r.overhead_seconds == null ? null : seconds(r.overhead_seconds) + " until it was sent"]]),
  ].filter(Boolean));
}
// timeline is where the time went: parts that follow each other and add up to the whole.
function timeline(r) {
  const total = r.duration_seconds, parts = [];
  const tries = r.attempts || [], before = tries.slice(0, -1).reduce((s, a) => s + a.seconds, 0);
  const add = (key, name, s, more) => { if (s > 0) parts.push({ key, name, s, more }); };
  add("read", "Reading the request", r.read_seconds);
  add("queue", "Waiting for admission", r.queue_seconds);
  add("choose", "Choosing", r.decision_seconds);
  if (r.sent_seconds != null) {
    add("before", "Endpoints that failed before", before);
    add("send", "Connecting and sending", r.sent_seconds - r.read_seconds - r.queue_seconds - r.decision_seconds - before);
    if (r.first_byte_seconds != null) {
      add("first", r.stream ? "Server until the first token" : "Server until its answer", r.first_byte_seconds - r.sent_seconds);
      add("answer", r.stream ? "Streaming the answer" : "Relaying the answer", total - r.first_byte_seconds, r.output_tokens > 1 && r.stream ? trim((r.output_tokens - 1) / Math.max(1e-6, total - r.first_byte_seconds), 0) + " tokens/s" : "");
    } else add("first", "Server, without an answer", total - r.sent_seconds);
  } else add("before", tries.length ? "Trying endpoints" : "In the gateway", total - r.read_seconds - r.queue_seconds - r.decision_seconds);
  const sum = parts.reduce((s, p) => s + p.s, 0) || 1;
  return [h("h3", {}, "Where its time went"),
    h("div", { class: "timeline", "aria-hidden": "true" }, parts.map((p) => h("i", { class: "c-" + p.key, style: { width: (p.s / sum * 100).toFixed(2) + "%" }, title: p.name }))),
    h("table", { "aria-label": "Where its time went", class: "plain" }, h("tbody", {}, parts.map((p) => h("tr", {}, h("td", {}, h("span", { class: "square c-" + p.key, "aria-hidden": "true" }), p.name), h("td", { class: "muted" }, p.more || ""), h("td", { class: "num" }, seconds(p.s)), h("td", { class: "num muted" }, percent(p.s / sum))))))];
}
function prediction(r) {
  const a = actualTTFT(r);
  if (r.predicted_ttft_seconds == null || !r.endpoint) return [];
  return [h("h3", {}, "First token, predicted and actual"), h("p", { class: late(r) ? "warn" : "" }, a == null
    ? "Predicted " + seconds(r.predicted_ttft_seconds) + " after sending; an answer that is not streamed does not show it."
    : "Predicted " + seconds(r.predicted_ttft_seconds) + " after sending, came after " + seconds(a) + ": " + times(a / r.predicted_ttft_seconds) + ".")];
}
function attempted(r) {
  if (!r.attempts?.length) return [];
  return [h("h3", {}, plural(r.attempts.length, "attempt")), h("table", { "aria-label": "Attempts" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Endpoint"), h("th", { scope: "col" }, "Outcome"), h("th", { scope: "col", class: "num" }, "Took"))),
    h("tbody", {}, r.attempts.map((a) => { const tr = row([{}, {}, { class: "num" }], () => openEndpoint(a.endpoint)); setText(tr.cells[0], a.endpoint); setText(tr.cells[1], a.outcome); tr.cells[1].className = a.outcome === "ok" ? "muted" : "bad"; setText(tr.cells[2], seconds(a.seconds)); return tr; })))];
}
function decided(r) {
  const out = [h("h3", {}, "Why there")], x = r.explanation;
  if (!r.endpoint) return [];
  if (!x) {
    out.push(h("p", {}, why(r) + "."));
    if (r.runner_up) out.push(h("p", { class: "muted" }, `Its cost was ${count(Math.round(r.cost))}, that of ${r.runner_up} ${count(Math.round(r.runner_up_cost))}.`));
    out.push(h("p", { class: "note" }, r.explained ? "The whole explanation has made room for newer ones." : "The whole explanation was not kept: only as many are as debug.explain_share pays for, and simple policies have none."));
    return out;
  }
  const auto = x.endpoints.some((e) => e.terms_tokens), scored = x.endpoints.find((e) => e.scores?.length)?.scores;
  out.push(h("p", {}, "Policy ", h("strong", {}, x.policy), ` on snapshot ${x.snapshot_version}: ${count(x.prompt_tokens)} prompt tokens, ${count(x.output_tokens)} of output expected. `,
    x.panic ? h("span", { class: "bad" }, "Every endpoint was down or ejected, so all were tried. ") : "", x.runner_up ? `Ahead of ${x.runner_up} by ${auto ? count(Math.round(x.ahead_by)) + " tokens" : trim(x.ahead_by, 3) + " of score"}.` : ""));
  if (auto) {
    const sum = (t) => (t.pending + t.new + t.kv + t.overflow) * t.slowness + t.adapter + t.stale + t.slow_start;
    const part = (t, k) => ["pending", "new", "kv", "overflow"].includes(k) ? t[k] * t.slowness : t[k];
    const most = Math.max(1, ...x.endpoints.filter((e) => e.terms_tokens).map((e) => sum(e.terms_tokens)));
    const used = termKeys.filter((k) => x.endpoints.some((e) => e.terms_tokens && part(e.terms_tokens, k) >= 0.5));
    out.push(h("div", { class: "legend" }, used.map((k) => h("span", { title: termTitles[k] }, h("span", { class: "square c-" + k, "aria-hidden": "true" }), termWords[k])), h("span", {}, "in prefill tokens; less is better")));
    out.push(h("div", { class: "scroll" }, h("table", { "aria-label": "Cost of each endpoint" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Endpoint"), h("th", { scope: "col" }, "Cost"), h("th", { scope: "col", class: "num" }, "Sum"), h("th", { scope: "col", class: "num", title: "The sum over the endpoint's prefill rate" }, "As time"), used.map((k) => h("th", { scope: "col", class: "num", title: termTitles[k] }, termWords[k])))),
      h("tbody", {}, x.endpoints.map((e) => {
        const t = e.terms_tokens, name = shortID(e.id, r.pool);
        const first = h("td", { title: e.id }, name, e.chosen ? h("strong", {}, " ← chosen") : "");
        if (!t) return h("tr", {}, first, h("td", { colspan: used.length + 3, class: "muted" }, e.filtered ? "left out: " + e.filtered : "not ranked"));
        const s = sum(t), tr = h("tr", {}, first,
          h("td", { style: { minWidth: "110px" } }, h("div", { class: "terms", "aria-hidden": "true", style: { width: Math.max(1, s / most * 100) + "%" } }, used.map((k) => h("i", { class: "c-" + k, style: { width: part(t, k) / Math.max(s, 1e-9) * 100 + "%" } })))),
          h("td", { class: "num" }, count(Math.round(s))), h("td", { class: "num muted" }, e.filtered ? e.filtered : e.busy ? "busy" : seconds(s / e.prefill_tokens_per_second)),
          used.map((k) => h("td", { class: "num" + (part(t, k) < 0.5 ? " zero" : "") }, count(Math.round(part(t, k))))));
        if (e.chosen) tr.className = "selected";
        return tr;
      })))));
  } else if (scored) {
    out.push(h("div", { class: "scroll" }, h("table", { "aria-label": "Scores of each endpoint" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Endpoint"), scored.map((s) => h("th", { scope: "col", class: "num" }, s.scorer + " ×" + s.weight)), h("th", { scope: "col", class: "num" }, "Total"))),
      h("tbody", {}, x.endpoints.map((e) => h("tr", { class: e.chosen ? "selected" : null }, h("td", {}, shortID(e.id, r.pool), e.chosen ? h("strong", {}, " ← chosen") : ""),
        e.scores?.length ? [e.scores.map((s) => h("td", { class: "num" }, trim(s.score, 2))), h("td", { class: "num" }, trim(e.total || 0, 2))] : h("td", { colspan: scored.length + 1, class: "muted" }, "left out: " + (e.filtered || ""))))))));
  } else {
    out.push(h("div", { class: "tags" }, x.endpoints.map((e) => h("span", { class: "tag" + (e.chosen ? " on" : "") }, shortID(e.id, r.pool) + (e.filtered ? " (" + e.filtered + ")" : "")))));
  }
  if (x.omitted) out.push(h("p", { class: "note" }, `and ${x.omitted} endpoints that cost more or were left out.`));
  return out;
}

// ---- Actions.
let token = sessionStorage.getItem("kvgate-token") || "";
async function post(path) {
  const r = await fetch(url(path), { method: "POST", headers: { Authorization: "Bearer " + token } });
  const body = await r.json().catch(() => ({}));
  return { ...body, status: r.status, error: r.ok ? undefined : body.error || "status " + r.status };
}
// unlock asks for the token until it is right; it resolves to false if the dialog is cancelled.
function unlock() {
  return new Promise((resolve) => {
    const d = $("token-dialog"), form = d.querySelector("form");
    setText($("token-error"), "");
    $("token").value = "";
    const done = (ok) => { form.onsubmit = d.onclose = $("token-cancel").onclick = null; d.close(); resolve(ok); };
    form.onsubmit = async (e) => {
      e.preventDefault();
      token = $("token").value.trim();
      const r = await post("-/authorized").catch((err) => ({ error: err.message }));
      if (r.error) { setText($("token-error"), r.status === 401 ? "That is not the token." : r.error); return; }
      sessionStorage.setItem("kvgate-token", token);
      done(true);
    };
    $("token-cancel").onclick = () => done(false);
    d.onclose = () => done(false);
    d.showModal();
  });
}
// action posts, asking for the token where it is missing or wrong; null: it was not given.
async function action(path) {
  try {
    if (!token && !await unlock()) return null;
    let r = await post(path);
    if (r.status === 401) { if (!await unlock()) return null; r = await post(path); }
    return r;
  } catch (err) { return { error: err.message }; }
}

// ---- Everything that listens.
function start() {
  buildFigures();
  head($("pools"), poolColumns);
  head($("endpoints"), endpointColumns, (c) => {
    state.sort = state.sort.key === c.key ? { key: c.key, up: !state.sort.up } : { key: c.key, up: c.key === "id" || c.key === "state" };
    order = null;
    draw();
  });
  head($("requests"), requestColumns);
  $("endpoints").tBodies[0].addEventListener("keydown", moveCursor);
  $("endpoints-scroll").addEventListener("scroll", () => { if (state.gateway) drawEndpoints(); }, { passive: true });
  $("endpoints-scroll").addEventListener("pointerenter", () => { hovered = true; });
  $("endpoints-scroll").addEventListener("pointerleave", () => { hovered = false; });
  $("requests-scroll").addEventListener("pointerenter", () => { requestsHeld = true; });
  $("requests-scroll").addEventListener("pointerleave", () => { requestsHeld = false; draw(); });
  $("filter").addEventListener("input", () => { state.filter = $("filter").value.trim().toLowerCase(); order = null; $("endpoints-scroll").scrollTop = 0; draw(); });
  $("map").addEventListener("pointermove", (ev) => {
    const e = cellAt(ev), tip = $("tip");
    tip.hidden = !e;
    if (!e) return;
    setText(tip, `${e.id}\n${stateOf(e)}, KV ${percent(e.kv_cache_utilization)}, ${plural(e.booked_requests, "request")}`);
    tip.style.left = Math.min(ev.clientX + 12, innerWidth - 240) + "px"; tip.style.top = ev.clientY + 14 + "px";
  });
  $("map").addEventListener("pointerleave", () => { $("tip").hidden = true; });
  $("map").addEventListener("click", (ev) => { const e = cellAt(ev); if (e) openEndpoint(e.id); });
  $("detail-close").addEventListener("click", () => closeDetail());
  $("pause").addEventListener("click", pause);
  $("theme").addEventListener("click", nextTheme);
  $("actions-button").addEventListener("click", async () => {
    if (!token && !await unlock()) return;
    $("do-level").value = state.gateway.log_level || "info";
    setText($("actions-result"), "");
    $("actions-dialog").showModal();
  });
  $("actions-close").addEventListener("click", () => $("actions-dialog").close());
  $("do-reload").addEventListener("click", async () => {
    const r = await action("-/reload");
    if (r) setText($("actions-result"), r.error ? "Refused; the configuration in use stays: " + r.error : r.changed ? "Reloaded " + r.file + "." : "Nothing has changed." + (r.needs_restart ? " Waiting for a restart: " + r.needs_restart.join(", ") + "." : ""));
  });
  $("do-level").addEventListener("change", async () => {
    const r = await action("-/log-level?level=" + encodeURIComponent($("do-level").value));
    if (r) setText($("actions-result"), r.error ? "Refused: " + r.error : "The log level is " + r.level + ".");
  });
  document.addEventListener("keydown", (e) => {
    if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
    if (e.key === "Escape") { if (state.detail) closeDetail(); else if (e.target === $("filter")) { $("filter").value = ""; $("filter").dispatchEvent(new Event("input")); $("filter").blur(); } return; }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    if (e.key === "/") { e.preventDefault(); $("filter").focus(); }
    if (e.key === "p") pause();
    if (e.key === "t") nextTheme();
  });
  addEventListener("popstate", fromHash);
  addEventListener("resize", draw);
  setTheme(localStorage.getItem("kvgate-theme") || "auto");
  connect();
  if (location.hash) { const wait = setInterval(() => { if (state.gateway) { clearInterval(wait); fromHash(); } }, 100); }
}
function pause() {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", state.paused);
  setText($("pause"), state.paused ? "Paused" : "Pause");
  draw();
}
function setTheme(t) {
  if (t === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = t;
  localStorage.setItem("kvgate-theme", t);
  setText($("theme"), "Theme: " + t);
  draw();
}
function nextTheme() {
  const all = ["auto", "light", "dark"];
  setTheme(all[(all.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3]);
}
start();
