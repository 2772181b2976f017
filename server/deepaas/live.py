"""Live: the page that shows a running training. It loads nothing from other hosts. Sent by jobs.py.

It requests `progress` and `log` next to its own URL, and shows them as text: nothing is parsed as HTML.
"""

from __future__ import annotations

PAGE = b"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
progress { width: 100%; height: 1.2rem; }
pre { max-height: 60vh; overflow: auto; padding: .8rem; border: 1px solid #8888; border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.error { color: #c22; } .done { color: #282; }
</style>
<h1>Training of <span id="model"></span>: <span id="status" role="status">...</span></h1>
<p><code id="uuid"></code></p>
<progress id="bar" max="1" aria-label="Progress"></progress>
<p id="details"></p>
<pre id="log" tabindex="0" aria-label="Log"></pre>
<noscript>This page needs JavaScript; <a href="log">log</a>, <a href="progress">progress</a>.</noscript>
<script>
"use strict";
const at = id => document.getElementById(id);
const folder = location.pathname.replace(/page$/, "");
const get = async what => {
  const answer = await fetch(folder + what, {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status === 404 ? "gone" : "status " + answer.status);
  return answer;
};
const span = seconds => {
  const whole = Math.floor(seconds), two = n => String(n).padStart(2, "0");
  return Math.floor(whole / 3600) + ":" + two(Math.floor(whole / 60) % 60) + ":" + two(whole % 60);
};
const percent = share => Math.round(share * 100) + " %";
function show(now) {
  at("model").textContent = now.model;
  at("uuid").textContent = now.uuid;
  at("status").textContent = now.phase === "ended" ? now.status : now.phase;
  at("status").className = now.status;
  document.title = now.model + ": " + at("status").textContent;
  const share = now.progress ?? now.epoch_progress;
  if (share === null) at("bar").removeAttribute("value"); else at("bar").value = share;
  if (share === null && now.phase === "ended") at("bar").value = 0;
  const details = [span(now.elapsed)];
  if (now.progress !== null) details.push(percent(now.progress));
  if (now.epoch !== null) details.push("epoch " + now.epoch + (now.epochs ? " of " + now.epochs : ""));
  if (now.epoch_progress !== null) details.push(percent(now.epoch_progress) + " of it");
  at("details").textContent = details.join(" \\u00b7 ");
}
async function look() {
  let again = 2000;
  try {
    const now = await (await get("progress")).json(), log = await (await get("log")).text();
    show(now);
    const box = at("log"), below = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (box.textContent !== log) box.textContent = log;
    if (below) box.scrollTop = box.scrollHeight;
    if (now.phase === "ended") again = 0;
  } catch (error) {
    if (error.message === "gone") again = 0;
    at("details").textContent = again ? "No answer: " + error.message : "This training no longer exists.";
  }
  if (again) setTimeout(look, again);
}
look();
</script>
</html>
"""
