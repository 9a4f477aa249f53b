// Shared by the scripts of Node's clients: what `checks.py` has for Python's.
const env = process.env;
export const URL = env.CHAT_URL, CALLER_URL = env.CALLER_URL;
export const ROOT = URL.replace(/\/v1$/, ""), CALLER_ROOT = CALLER_URL.replace(/\/v1$/, "");
export const KEY = "the-key", MODEL = "smollm2", CALLER = "caller.gguf";
export const QUESTION = "Name the planets of the solar system.";
export const MESSAGES = [{ role: "user", content: QUESTION }];
export const LENGTH = 32;
export const TOO_LONG = 50_000;
export const SCHEMA = {
  type: "object",
  title: "Planet",
  description: "A planet.",
  properties: {
    name: { type: "string", maxLength: 12 },
    moons: { type: "integer", minimum: 0, maximum: 99 },
  },
  required: ["name", "moons"],
  additionalProperties: false,
};
export const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const FUNCTION = { name: "weather", description: "The weather of a city.", parameters: PARAMETERS };
export const REPLY = "It is sunny in Bern.";

export function check(holds, what) {
  if (!holds) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export function same(one, other) {
  check(JSON.stringify(one) === JSON.stringify(other), `${JSON.stringify(one)} is not ${JSON.stringify(other)}`);
  return one;
}

export function planet(value) {
  const { name, moons } = typeof value === "string" ? JSON.parse(value) : value;
  check(typeof name === "string" && moons >= 0 && moons <= 99, value);
  return `{"name": ${JSON.stringify(name)}, "moons": ${moons}}`;
}

// The first numbers of an embedding, as Python prints them.
export function embedded(vector) {
  return `[${Array.from(vector).slice(0, 8).map((number) => Number(number.toFixed(5))).join(", ")}]`;
}

export async function raised(call, holds) {
  try {
    await call();
  } catch (error) {
    check(holds(error), `another error: ${error}`);
    return error;
  }
  throw new Error("no error");
}

export async function run(checks) {
  for (const [name, made] of Object.entries(checks)) {
    let line;
    try {
      line = { check: name, passed: true, answer: (await made()) ?? null };
    } catch (error) {
      line = { check: name, passed: false, answer: `${error?.stack ?? error}` };
    }
    console.log(JSON.stringify(line));
  }
}
