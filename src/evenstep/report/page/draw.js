"use strict";
// Small pieces that every picture uses. Foreign text only ever becomes text nodes and attribute values.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function withAttributes(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of [children].flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}
const html = (name, attributes, children) => withAttributes(document.createElement(name), attributes, children);
const svg = (name, attributes, children) => withAttributes(document.createElementNS(SVG, name), attributes, children);

function whole(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}
function figure(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") {
    const steps = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]];
    const [name, size] = steps.find(([, size]) => value >= size) || ["bytes", 1];
    return (value / size).toLocaleString("en-US", { maximumFractionDigits: size === 1 ? 0 : 1 }) + " " + name;
  }
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return value.toExponential(2);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return whole(value);
  return String(Number(value.toPrecision(4)));
}
const share = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const counted = (number, noun) => whole(number) + " " + noun + (number === 1 ? "" : "s");

function facts(pairs) {
  return html("dl", { class: "facts" }, pairs.map(([name, value, isLong]) =>
    html("div", { class: isLong ? "long" : null }, [html("dt", {}, name), html("dd", {}, value)])));
}

function table(head, lines) {
  return html("table", {}, [
    html("thead", {}, html("tr", {}, head.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, lines.map((line) => html("tr", {}, line.map((text, at) =>
      at ? html("td", {}, text) : html("th", { scope: "row" }, text))))),
  ]);
}

// A hash such as #plan=12; plain anchors such as #curves stay as they are.
function fromHash(name) {
  const found = new RegExp("^#" + name + "=(.*)$").exec(location.hash);
  if (!found) return null;
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return null;
  }
}
function toHash(name, value) {
  history.replaceState(null, "", "#" + name + "=" + encodeURIComponent(value));
}
