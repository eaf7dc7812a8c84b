// Builds elements. Text is always text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Set the text only if it differs, so that a selection and screen readers are left alone.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Keep one child for each item, by key: move, update, make or remove as few as possible.
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const unused = new Set(parent.children); // also those with the key of another one
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    old.delete(key);
    unused.delete(child);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of unused) child.remove();
}
