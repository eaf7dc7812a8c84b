// Numbers, times and text of workers, as people read them.

const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return NONE;
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 2);
  const places = value === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(places, 8) });
}

export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

export function percent(share, digits = 1) {
  return known(share) ? `${(share * 100).toFixed(digits)} %` : NONE;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${number(value * 1e3, 3)} ms`;
  if (value < 60) return `${number(value, 3)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return `${number(value, 3)} ${unit}`;
    value /= 1024;
  }
}

export function clock(at, { date = false, fine = true } = {}) {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString("en-GB", fine ? {} : { hour: "2-digit", minute: "2-digit" });
  return date ? `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}` : time;
}

export function count(amount, noun) {
  return `${whole(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}

// Characters that would change how other text is shown: controls, and marks that turn the direction of text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

export function visible(text) {
  return text.replace(/\r\n?/g, "\n").replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function oneLine(text, limit = 400) {
  const found = visible(String(text ?? "")).replace(/\s+/g, " ").trim();
  return found.length > limit ? `${found.slice(0, limit)}…` : found;
}
