"""Which JSON schemas does xgrammar follow to the letter?

xgrammar reads one keyword of a schema at a time, and ignores what it has no rules for. It says so
in a log at most, and the text then matches its grammar but not the schema:

    {"type": "array", "uniqueItems": true}          uniqueItems is ignored: [1, 1]
    {"anyOf": [...], "minProperties": 2}            what stands beside anyOf is ignored
    {"minimum": 3}                                  without a type, everything is allowed
    {"properties": {"a": {"type": "string"}},       other properties may be called "a", too:
     "additionalProperties": true}                  {"a": "x", "a": 5}

`find_unsupported` names the first such thing. What is left may be stricter than the schema, never
looser: every text is valid. (The package llguidance refuses by itself what it does not implement.)

Of the 383 schemas of the JSON Schema Test Suite, draft 2020-12 (44401e0c), which tries each keyword
alone, these are taken; no value that they forbid was allowed:

    xgrammar   115    most need a type. None with contains, dependencies, if, not, uniqueItems,
                      multipleOf, patternProperties and propertyNames without a type
    guidance   169    none with contains, dependencies, if, not, uniqueItems, propertyNames,
                      unevaluatedItems, unevaluatedProperties
    one of them 192

JSON Schema 2020-12: https://json-schema.org/draft/2020-12
vLLM: vllm/v1/structured_output/backend_xgrammar.py (V1), has_xgrammar_unsupported_json_features,
which lets some of these pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.structured_output.dfa import build_nfa, rewrite

Schema = dict[str, Any]

NEVER = {"$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef"}
NEVER |= {"additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas"}
NEVER |= {"else", "id", "if", "maxContains", "minContains", "multipleOf", "not", "then"}
# Where schemas are inside a schema: a schema or a list of them; names and schemas.
PARTS = {"additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if"}
PARTS |= {"items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems"}
PARTS |= {"unevaluatedProperties"}
DEFINITIONS = {"$defs", "definitions"}  # count only where a $ref points to them
MAPS = DEFINITIONS | {"dependentSchemas", "patternProperties", "properties"}
KEYWORDS_OF = {  # JSON type -> what xgrammar enforces for it
    "object": {"additionalProperties", "maxProperties", "minProperties", "patternProperties"}
    | {"properties", "propertyNames", "required", "unevaluatedProperties"},
    "array": {"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"},
    "string": {"format", "maxLength", "minLength", "pattern"},
    "number": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"},
    "integer": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"},
    "boolean": set(),
    "null": set(),
}
MAKES_OBJECT = {"additionalProperties", "properties", "unevaluatedProperties"}  # also without type
MAKES_ARRAY = {"items", "prefixItems", "unevaluatedItems"}
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first of these is read alone
# What JSON writes in a string as it is: no quote, backslash, control character or surrogate.
CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
MAX_COUNTED = 32  # properties: the time to compile grows with the third power
# Not ipv4, of which it allows 0.0.0.01, and no JSON pointers, in which it allows a bare quote.
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv6", "time", "uri"}
FORMATS |= {"uri-reference", "uri-template", "uuid"}
MIN_RANGE = 1e-5  # it writes six decimals, and where none of these numbers fits, nothing at all
MAX_COMPARED = 10_000  # values, to see whether alternatives exclude each other (some ms)
MAX_LEVELS = 8  # of objects in them


def find_unsupported(schema: Any, is_compact: bool = False) -> str | None:
    """Something in this schema that xgrammar does not enforce: "uniqueItems" or "minimum without a
    type"; None if it enforces all of it. is_compact: there is to be no whitespace."""
    todo = [schema]
    seen = dict[int, Schema]()
    while todo:
        part = todo.pop()
        if is_compact and (part is True or part == {}):
            return "disable_any_whitespace in values without a schema"
        if not isinstance(part, dict) or id(part) in seen:
            continue  # a boolean; what is no schema at all, the compiler will refuse
        seen[id(part)] = part
        if (found := _find_here(part, schema)) is not None:
            return found
        todo += _parts(part)
        if isinstance(part.get("$ref"), str):
            todo.append(_resolve(part, schema))
    return None


def close(schema: Any) -> Any:
    """The same schema, in which an object that lists its properties has no others, unless the
    schema says that it may."""
    if not isinstance(schema, dict):
        return schema
    closed = _map_parts(schema, close)
    if {"properties", "patternProperties"} & set(schema):
        closed.setdefault("additionalProperties", False)
    return closed


def adapt(schema: Any) -> Any:
    """The same schema, as xgrammar has to be told: with minLength or maxLength it allows control
    characters and surrogates (and compiles longer than a pattern)."""
    if not isinstance(schema, dict):
        return schema
    adapted = _map_parts(schema, adapt)
    low, high = adapted.pop("minLength", 0), adapted.pop("maxLength", None)
    if low or high is not None:
        most = "" if high is None else high
        adapted["pattern"] = f"^{CHARACTER}{{{low},{most}}}$"
    return adapted


def rewrite_patterns(schema: Any) -> Any:
    """The same schema, with regular expressions that every library reads alike. One that is not
    regular stays as it is."""
    if not isinstance(schema, dict):
        return schema
    written = _map_parts(schema, rewrite_patterns)
    if isinstance(patterns := written.get("patternProperties"), dict):
        others = {_rewrite(key): part for key, part in patterns.items()}
        written["patternProperties"] = others if len(others) == len(patterns) else patterns
    if "pattern" in written:
        written["pattern"] = _rewrite(written["pattern"])
    return written


def _rewrite(pattern: Any) -> Any:
    try:
        return rewrite(pattern, in_schema=True)
    except (VLLMValidationError, TypeError):
        return pattern


def _map_parts(schema: Schema, function: Callable[[Any], Any]) -> Schema:
    """A copy, with the function's results instead of the schemas directly inside."""
    mapped = dict(schema)
    for key in PARTS & set(schema):
        value = schema[key]
        is_list = isinstance(value, list)
        mapped[key] = [function(part) for part in value] if is_list else function(value)
    for key in MAPS & set(schema):
        if isinstance(schema[key], dict):
            mapped[key] = {name: function(part) for name, part in schema[key].items()}
    return mapped


def _parts(schema: Schema) -> Iterator[Any]:
    """The schemas directly inside this one."""
    for key in PARTS & set(schema):
        value = schema[key]
        if key == "propertyNames" and isinstance(value, dict):
            value = {"type": "string", **value}  # a name is nothing else
        yield from value if isinstance(value, list) else [value]
    for key in MAPS & set(schema) - DEFINITIONS:
        if isinstance(schema[key], dict):
            yield from schema[key].values()


def _find_here(schema: Schema, root: Schema) -> str | None:
    """find_unsupported() for one schema without its parts."""
    keys = set(schema) & (NEVER | set(ALONE) | {"type", "uniqueItems"}).union(*KEYWORDS_OF.values())
    if schema is root:
        keys -= {"$id", "id"}
    if not schema.get("uniqueItems"):
        keys -= {"uniqueItems"}
    for key in sorted(keys & (NEVER | {"uniqueItems"})):
        return key
    for key in ("type", "anyOf", "oneOf"):
        if schema.get(key) == []:
            return f"an empty {key}, which no value fits"
    for key in ALONE:
        if key in keys:
            return _find_beside(key, keys - {key}, schema, root)
    types = schema.get("type")
    if types is None:
        types = ["object"] if keys & MAKES_OBJECT else ["array"] if keys & MAKES_ARRAY else []
        for key in sorted(keys) if not types else ():
            return f"{key} without a type"
    types = types if isinstance(types, list) else [types]
    if "object" in types and (found := _find_in_object(schema)):
        return found
    if "string" in types and (found := _find_in_string(schema)):
        return found
    if "number" in types:
        low = max(schema.get(key, -math.inf) for key in ("minimum", "exclusiveMinimum"))
        high = min(schema.get(key, math.inf) for key in ("maximum", "exclusiveMaximum"))
        if high - low < MIN_RANGE:
            return f"numbers between {low} and {high}"
    return None


def _find_beside(key: str, others: set[str], schema: Schema, root: Schema) -> str | None:
    """What is not enforced of a schema that is read for one keyword alone."""
    values = [schema["const"]] if key == "const" else schema.get("enum")
    if key in ("const", "enum") and isinstance(values, list):
        types = schema.get("type", list(KEYWORDS_OF))
        types = types if isinstance(types, list) else [types]
        if all(_type_of(value) & set(types) for value in values):
            others -= {"type"}
    if others:
        return f"{min(others)} beside {key}"
    if key == "$ref":
        return None if _resolve(schema, root) is not None else f"$ref {brief(schema['$ref'])}"
    if key == "allOf" and len(schema["allOf"]) != 1:
        return "allOf of several"
    if key == "oneOf" and isinstance(schema["oneOf"], list):
        budget = [MAX_COMPARED]
        for one, other in combinations(schema["oneOf"], 2):
            if not _are_disjoint(one, other, root, budget):
                return "oneOf whose alternatives may overlap"
    return None


def _find_in_object(schema: Schema) -> str | None:
    """Names that are not listed may be said twice, and may be names that are listed."""
    properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    key = (
        "patternProperties" if patterns else "propertyNames" if "propertyNames" in schema else None
    )
    if key and properties:
        return f"{key} beside properties"
    if patterns and ("propertyNames" in schema or len(patterns) > 1):
        return "patternProperties beside others or propertyNames"
    if key == "propertyNames" and others not in (None, True, {}):
        return "additionalProperties beside propertyNames"
    if properties and others not in (None, False):
        return "additionalProperties beside properties"
    if len(properties) > MAX_COUNTED and {"minProperties", "maxProperties"} & set(schema):
        return f"minProperties or maxProperties beside more than {MAX_COUNTED} properties"
    if schema.get("minProperties", 0) > 1 and not properties:
        return "minProperties without properties"
    for name in schema.get("required", ()):
        if name not in properties:
            return f"the required property {brief(name)}, which is not in properties"
    return next(filter(None, map(_find_in_pattern, patterns)), None)


def _find_in_string(schema: Schema) -> str | None:
    if "format" in schema and schema["format"] not in FORMATS:
        return f"the format {brief(schema['format'])}"
    bounds = {"minLength", "maxLength"} & set(schema)
    for key in sorted(bounds):
        if type(schema[key]) is not int:
            return f"the {key} {brief(schema[key])}"
    for key in ("pattern", "format"):
        if key in schema and bounds:
            return f"{min(bounds)} beside {key}"
    if "pattern" in schema and "format" in schema:
        return "format beside pattern"
    return _find_in_pattern(schema["pattern"]) if "pattern" in schema else None


def _find_in_pattern(pattern: Any) -> str | None:
    """What xgrammar would write into a string as it stands, though JSON has to escape it, too."""
    try:
        nfa = build_nfa(pattern, is_outline=True)
    except (VLLMValidationError, TypeError) as error:
        return f"a pattern that is refused ({error})"
    for low, high in {edge[:2] for edges in nfa.edges for edge in edges}:
        is_control = low > 0 and high < 0x1F and (low, high) != (9, 13)  # not of \s or \S
        if is_control or (low == high and low in b'\0\x1f"\\'):
            return f"a pattern with the character {chr(low)!r}"
    return None


def _resolve(schema: Schema, root: Schema) -> Any:
    """The schema that its $ref "#/..." points to; None if it is no such reference."""
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    found: Any = root
    for key in filter(None, reference[1:].split("/")):
        found = found.get(key) if isinstance(found, dict) else None
    return found


# -- oneOf: xgrammar takes it as anyOf, which is the same if no value fits two alternatives --


def _are_disjoint(one: Any, other: Any, root: Schema, budget: list[int], level: int = 0) -> bool:
    """Can no value fit both? False also if that is not clear. budget: how many values may still be
    compared; a schema may be recursive."""
    one, other = _follow(one, root), _follow(other, root)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    values, others = _values_of(one), _values_of(other)
    budget[0] -= len(values or "1") * len(others or "1")
    if budget[0] < 0 or level > MAX_LEVELS:
        return False
    if values is not None and others is not None:
        return not any(value == its for value in values for its in others)
    types, its_types = _types_of(one), _types_of(other)
    if not types & its_types:
        return True
    # Both are objects, and have a property that tells which one it is.
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return (types | its_types) == {"object"} and any(
        _are_disjoint(
            one["properties"].get(name), other["properties"].get(name), root, budget, level + 1
        )
        for name in shared
        if isinstance(one.get("properties"), dict) and isinstance(other.get("properties"), dict)
    )


def _follow(schema: Any, root: Schema) -> Any:
    for _ in range(8):  # references to references
        if not (isinstance(schema, dict) and "$ref" in schema):
            break
        schema = _resolve(schema, root)
    return schema


def _values_of(schema: Schema) -> list[Any] | None:
    """The only values that fit; None if there are others."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types_of(schema: Schema) -> set[str]:
    """The JSON types that may fit; an integer is a number, too."""
    if (values := _values_of(schema)) is not None:
        return {name for value in values for name in _type_of(value)}
    types = schema.get("type", list(KEYWORDS_OF))
    found = set(types if isinstance(types, list) else [types])
    return found | {"integer", "number"} if found & {"integer", "number"} else found


def _type_of(value: Any) -> set[str]:
    """The JSON types of a value."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}
