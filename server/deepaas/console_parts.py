"""Constant parts of the console: its style, and the script that sends its forms."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid #8888; margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
form { border: 1px solid #8888; border-radius: 6px; padding: 1rem; }
.field { display: grid; grid-template-columns: 12rem 1fr; gap: 0 1rem; margin-bottom: .8rem; }
.field label { overflow-wrap: anywhere; }
.field small { grid-column: 2; }
input, select, textarea { font: inherit; max-width: 100%; }
output { display: block; margin-top: 1rem; }
output pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; overflow: auto; background: #8882;
  padding: .6rem; }
output img { max-width: 100%; }
table { border-collapse: collapse; margin-top: 1rem; }
caption { text-align: left; font-weight: bold; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; }
nav ul { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; padding: 0; }
@media (max-width: 40rem) { .field { grid-template-columns: 1fr; } .field small { grid-column: 1; } }
"""
SCRIPT = """
"use strict";
const element = (name, text) => Object.assign(document.createElement(name), {textContent: text || ""});

function valueOf(field) {
  const kind = field.dataset.kind, text = field.value;
  if (kind === "array") return text.split("\\n").filter(line => line).map(line => plain(line));
  return kind === "string" ? text : plain(text);
}
function plain(text) {
  try { return JSON.parse(text); } catch { return text; }
}
function request(form) {
  const query = new URLSearchParams(), body = new FormData(), headers = {}, json = {};
  let hasForm = false;
  for (const field of form.querySelectorAll("[data-in]")) {
    const place = field.dataset.in, files = field.files;
    if (field.disabled || (files ? !files.length : !field.value)) continue;
    if (place === "json") { json[field.name] = valueOf(field); continue; }
    if (place === "header") { headers[field.name] = field.value; continue; }
    const lines = field.dataset.kind === "array" ? field.value.split("\\n").filter(line => line) : [field.value];
    for (const each of files || lines) {
      if (place === "form") { body.append(field.name, each); hasForm = true; } else query.append(field.name, each);
    }
  }
  const options = {method: "POST", headers};
  if (hasForm) options.body = body;
  else if (Object.keys(json).length) {
    options.body = JSON.stringify(json);
    headers["Content-Type"] = "application/json";
  }
  const search = query.toString();
  return [form.action + (search ? "?" + search : ""), options];
}
async function show(form, answer) {
  const output = form.querySelector("output"), type = answer.headers.get("Content-Type") || "";
  const parts = [element("p", answer.status + " " + answer.statusText + (type ? ", " + type : ""))];
  if (/json|^text\\//.test(type)) {
    const text = await answer.text();
    let shown = text;
    try {
      const parsed = JSON.parse(text);
      shown = JSON.stringify(parsed, null, 2);
      if (form.action.endsWith("/train/") && parsed.uuid) {
        const link = element("a", "Follow this training");
        link.href = form.action + encodeURIComponent(parsed.uuid) + "/page";
        parts.push(link);
      }
    } catch { /* it is no JSON, and shown as it is */ }
    parts.push(element("pre", shown));
  } else {
    const address = URL.createObjectURL(await answer.blob()), link = element("a", "Save the answer");
    link.href = address;
    link.download = form.action.split("/").slice(-3)[0];
    if (type.startsWith("image/")) parts.push(Object.assign(element("img"), {src: address, alt: "The answer"}));
    parts.push(link);
  }
  output.replaceChildren(...parts);
}
for (const form of document.forms) form.addEventListener("submit", async event => {
  event.preventDefault();
  const button = form.querySelector("button"), output = form.querySelector("output");
  button.disabled = true;
  output.hidden = false;
  output.replaceChildren(element("p", "Waiting for the answer ..."));
  try {
    const [address, options] = request(form);
    await show(form, await fetch(address, options));
  } catch (error) {
    output.replaceChildren(element("p", "No answer: " + error.message));
  }
  button.disabled = false;
});
for (const button of document.querySelectorAll("[data-end]")) button.addEventListener("click", async () => {
  button.disabled = true;
  await fetch(button.dataset.end, {method: "DELETE"});
  location.reload();
});
"""
