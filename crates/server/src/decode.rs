//! Decode: from the bytes of a request to what the engine takes.
//!
//! The text is checked once as a whole, so that a position in an error counts from the first byte that was sent. Then
//! it is taken apart without being copied into a tree: an input or a variable stays the text it was. Fields are read by
//! hand because serde's errors name no path and may quote the content.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use steadfast::core::event::Writes;
use steadfast::core::json::JsonError;
use steadfast::core::text::{Key, Tag};
use steadfast::{Invalid, Json, Limits, Request, RetryPolicy, Signal, StartOptions};

use crate::problem::Problem;

/// A request to start a workflow.
pub(crate) fn start(bytes: &[u8], limits: &Limits, variables_max: usize) -> Result<Request, Problem> {
    let text = checked(bytes)?;
    let mut body = Object::read(text, "", &["name", "id", "input", "writes", "options"])?;
    let Some(name) = body.text("name")? else { return Err(Problem::request("name", "is missing; name a definition")) };
    let id = body.text("id")?;
    let input = match body.take("input") {
        Some(input) => json("input", input.get(), limits)?,
        None => Json::null(),
    };
    let writes = match body.take_some("writes") {
        Some(writes) => variables(writes.get(), limits, variables_max)?,
        None => Writes::default(),
    };
    let options = match body.take_some("options") {
        Some(options) => start_options(options.get())?,
        None => StartOptions::default(),
    };
    Ok(Request { name, id, input: Ok(input), writes: Ok(writes), options })
}

/// A signal.
pub(crate) fn signal(bytes: &[u8], limits: &Limits) -> Result<Signal, Problem> {
    let mut body = Object::read(checked(bytes)?, "", &["name", "signal_id", "payload"])?;
    let Some(name) = body.text("name")? else { return Err(Problem::request("name", "is missing; name the signal")) };
    let id = body.text("signal_id")?;
    let payload = match body.take("payload") {
        Some(payload) => json("payload", payload.get(), limits)?,
        None => Json::null(),
    };
    Ok(Signal { name, id, payload: Ok(payload) })
}

/// What a cancel says about itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CancelBody {
    pub(crate) reason: Option<String>,
    pub(crate) by: Option<String>,
}

/// A cancel; no bytes at all say nothing.
pub(crate) fn cancel(bytes: &[u8]) -> Result<CancelBody, Problem> {
    if bytes.is_empty() {
        return Ok(CancelBody::default());
    }
    let mut body = Object::read(checked(bytes)?, "", &["reason", "by"])?;
    Ok(CancelBody { reason: body.text("reason")?, by: body.text("by")? })
}

/// The text of a body, known to be JSON but for its depth, which counts from each value and not from the body around it.
fn checked(bytes: &[u8]) -> Result<&str, Problem> {
    let text = str::from_utf8(bytes).map_err(|error| JsonError::NotUtf8 { offset: error.valid_up_to() })?;
    Json::parse_within(text, usize::MAX)?;
    Ok(text)
}

fn json(field: &str, text: &str, limits: &Limits) -> Result<Json, Problem> {
    Json::parse_within(text, limits.json_depth_max).map_err(|error| match error {
        JsonError::TooDeep { limit, .. } => Invalid {
            limit: Some(limit as u64),
            ..Invalid::new(
                error.code(),
                field,
                format!(
                    "is nested deeper than {limit} arrays and objects; flatten it, or send the inner part as a string"
                ),
            )
        }
        .into(),
        error => Problem::from(error),
    })
}

fn variables(text: &str, limits: &Limits, variables_max: usize) -> Result<Writes, Problem> {
    if !text.starts_with('{') {
        return Err(Problem::request("writes", "must be an object of variables"));
    }
    let members = Members { known: None, count_max: variables_max };
    let members = match members.deserialize(&mut serde_json::Deserializer::from_str(text)) {
        Ok(members) => members,
        Err(_) => {
            let problem = format!("has more than {variables_max} variables; put several into one object");
            return Err(Invalid {
                limit: Some(variables_max as u64),
                ..Invalid::new("writes_too_large", "writes", problem)
            }
            .into());
        }
    };
    let mut writes = Writes::default();
    for (key, value) in members {
        // Only a key that was checked may stand in an error.
        let key = Key::parse_as("writes", &key, limits)?;
        let value = json(&format!("writes.{key}"), value.get(), limits)?;
        writes.put(key, Some(value));
    }
    Ok(writes)
}

fn start_options(text: &str) -> Result<StartOptions, Problem> {
    let mut object = Object::read(text, "options", &["retry", "step_timeout_ms", "priority", "tags"])?;
    let retry = match object.take_some("retry") {
        Some(retry) => Some(retry_policy(retry.get())?),
        None => None,
    };
    let step_timeout_ms = object.whole("step_timeout_ms", 0, u64::MAX.into())?.map(|ms| ms as u64);
    let priority = object.whole("priority", i32::MIN.into(), i32::MAX.into())?.map(|priority| priority as i32);
    let tags = match object.take_some("tags") {
        Some(tags) => serde_json::from_str::<Vec<String>>(tags.get())
            .map_err(|_| Problem::request("options.tags", "must be an array of strings"))?,
        None => Vec::new(),
    };
    Ok(StartOptions { retry, step_timeout_ms, priority, tags: tags.into_iter().map(Tag::trusted).collect() })
}

fn retry_policy(text: &str) -> Result<RetryPolicy, Problem> {
    const FIELDS: &[&str] = &["attempts_max", "first_delay_ms", "factor_percent", "max_delay_ms", "jitter_percent"];
    let mut object = Object::read(text, "options.retry", FIELDS)?;
    let mut number = |name, max: u64| object.whole(name, 0, max.into()).map(|n| n.map(|n| n as u64));
    let (small, large) = (u32::MAX.into(), u64::MAX);
    let standard = RetryPolicy::default();
    Ok(RetryPolicy {
        attempts_max: number("attempts_max", small)?.map_or(standard.attempts_max, |n| n as u32),
        first_delay_ms: number("first_delay_ms", large)?.unwrap_or(standard.first_delay_ms),
        factor_percent: number("factor_percent", small)?.map_or(standard.factor_percent, |n| n as u32),
        max_delay_ms: number("max_delay_ms", large)?.unwrap_or(standard.max_delay_ms),
        jitter_percent: number("jitter_percent", small)?.map_or(standard.jitter_percent, |n| n as u32),
    })
}

/// An object with known fields. A field that is null counts as absent, but for the input.
struct Object<'a> {
    path: &'static str,
    members: Vec<(String, &'a RawValue)>,
}

impl<'a> Object<'a> {
    /// Reads a text that was checked.
    fn read(text: &'a str, path: &'static str, known: &'static [&'static str]) -> Result<Self, Problem> {
        let text = text.trim_start_matches([' ', '\t', '\n', '\r']);
        if !text.starts_with('{') {
            let field = if path.is_empty() { "body" } else { path };
            return Err(Problem::request(field, "must be an object"));
        }
        let members = Members { known: Some((path, known)), count_max: known.len() };
        match members.deserialize(&mut serde_json::Deserializer::from_str(text)) {
            Ok(members) => Ok(Self { path, members }),
            Err(error) => {
                // Our own message, which serde_json follows with a position.
                let unknown = error.to_string();
                let unknown = unknown.rsplit_once(" at line ").map_or(unknown.as_str(), |(field, _)| field);
                Err(Problem::request(unknown, &format!("is not a field here; there are: {}", known.join(", "))))
            }
        }
    }

    fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.members.iter().position(|(member, _)| member == name)?;
        Some(self.members.swap_remove(at).1)
    }

    fn take_some(&mut self, name: &str) -> Option<&'a RawValue> {
        self.take(name).filter(|value| value.get() != "null")
    }

    fn named(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, Problem> {
        let Some(value) = self.take_some(name) else { return Ok(None) };
        let text =
            serde_json::from_str(value.get()).map_err(|_| Problem::request(self.named(name), "must be a string"))?;
        Ok(Some(text))
    }

    /// A whole number. One that is too large for its type becomes the largest, which no limit allows.
    fn whole(&mut self, name: &str, min: i128, max: i128) -> Result<Option<i128>, Problem> {
        let Some(value) = self.take_some(name) else { return Ok(None) };
        let text = value.get();
        let digits = text.strip_prefix('-').unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Problem::request(
                self.named(name),
                "must be a whole number, without a fraction or an exponent",
            ));
        }
        if min == 0 && text.starts_with('-') && text != "-0" {
            return Err(Problem::request(self.named(name), "must not be negative"));
        }
        let huge = if text.starts_with('-') { i128::MIN } else { i128::MAX };
        Ok(Some(text.parse().unwrap_or(huge).clamp(min, max)))
    }
}

/// Takes an object apart: the keys decoded, the values as they stand. Stops at a key that is not known, or at one too
/// many, so that an object of a million fields costs no more than its text.
struct Members {
    known: Option<(&'static str, &'static [&'static str])>,
    count_max: usize,
}

impl<'de> DeserializeSeed<'de> for Members {
    type Value = Vec<(String, &'de RawValue)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        use serde::de::Error;
        let mut members = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if let Some((path, known)) = self.known
                && !known.contains(&key.as_str())
            {
                let key = steadfast::core::limits::cut(&key, 128);
                return Err(A::Error::custom(if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }));
            }
            if members.len() == self.count_max {
                return Err(A::Error::custom("too many"));
            }
            members.push((key, map.next_value()?));
        }
        Ok(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Request, String> {
        start(text.as_bytes(), &Limits::default(), 4).map_err(|problem| {
            let told = serde_json::to_value(problem.document()).unwrap();
            let word = |name: &str| told[name].as_str().unwrap_or("-").to_owned();
            format!("{} {} {}", word("code"), word("field"), told["limit"])
        })
    }

    #[test]
    fn values_stay_the_texts_they_were() {
        let request = read(
            r#" {"input": {"n": 9007199254740993, "d":0.10 ,"e":1e400, "z":"\u0000"}, "name":"a\u0062",
               "writes": {"k\/": [1.0,  2], "null": null}, "id":null, "options":{"priority":-7,"tags":["x"]}} "#,
        )
        .unwrap();
        assert_eq!(request.name, "ab");
        assert_eq!(request.id, None);
        let input = request.input.unwrap();
        assert_eq!(input.as_str(), r#"{"n": 9007199254740993, "d":0.10 ,"e":1e400, "z":"\u0000"}"#);
        let writes = request.writes.unwrap();
        assert_eq!(writes.get("k/").unwrap().unwrap().as_str(), "[1.0,  2]");
        assert!(writes.get("null").unwrap().unwrap().is_null(), "null is a value of a variable");
        assert_eq!(request.options.priority, Some(-7));
        assert_eq!(request.options.tags[0].as_str(), "x");
    }

    #[test]
    fn what_is_refused_is_named() {
        for (text, expected) in [
            ("", "invalid_json - null"),
            ("[]", "invalid_request body null"),
            ("3", "invalid_request body null"),
            ("{}", "invalid_request name null"),
            (r#"{"name":null}"#, "invalid_request name null"),
            (r#"{"name":3}"#, "invalid_request name null"),
            (r#"{"name":"a","id":3}"#, "invalid_request id null"),
            (r#"{"name":"a","name":"b"}"#, "invalid_json - null"),
            (r#"{"name":"a","naem":"b"}"#, "invalid_request naem null"),
            (r#"{"name":"a","x at line 1":1}"#, "invalid_request x at line 1 null"),
            (r#"{"name":"a","writes":[]}"#, "invalid_request writes null"),
            (r#"{"name":"a","writes":{"a":1,"b":1,"c":1,"d":1}}"#, "accepted"),
            (r#"{"name":"a","writes":{"a":1,"b":1,"c":1,"d":1,"e":1}}"#, "writes_too_large writes 4"),
            (r#"{"name":"a","writes":{"a":1,"\u0061":1}}"#, "invalid_json - null"),
            (r#"{"name":"a","options":3}"#, "invalid_request options null"),
            (r#"{"name":"a","options":{"prio":3}}"#, "invalid_request options.prio null"),
            (r#"{"name":"a","options":{"priority":"3"}}"#, "invalid_request options.priority null"),
            (r#"{"name":"a","options":{"priority":3.0}}"#, "invalid_request options.priority null"),
            (r#"{"name":"a","options":{"priority":1e1}}"#, "invalid_request options.priority null"),
            (r#"{"name":"a","options":{"step_timeout_ms":-1}}"#, "invalid_request options.step_timeout_ms null"),
            (r#"{"name":"a","options":{"tags":"x"}}"#, "invalid_request options.tags null"),
            (r#"{"name":"a","options":{"tags":[1]}}"#, "invalid_request options.tags null"),
            (r#"{"name":"a","options":{"retry":{"attempts":3}}}"#, "invalid_request options.retry.attempts null"),
            (r#"{"name":"a","options":{"retry":{"attempts_max":null}}}"#, "accepted"),
        ] {
            let found = read(text).map_or_else(|refused| refused, |_| "accepted".to_owned());
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn a_number_beyond_its_type_is_beyond_every_limit() {
        let priority = |text: &str| {
            let request = read(&format!(r#"{{"name":"a","options":{{"priority":{text}}}}}"#)).unwrap();
            request.options.priority.unwrap()
        };
        let huge = "9".repeat(60);
        assert_eq!(priority("2147483648"), i32::MAX);
        assert_eq!(priority(&huge), i32::MAX);
        assert_eq!(priority(&format!("-{huge}")), i32::MIN);
        assert_eq!(priority("-0"), 0);
    }

    #[test]
    fn depth_counts_from_the_value() {
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        let input = |n| read(&format!(r#"{{"name":"a","input":{}}}"#, nested(n))).map(|_| ());
        let variable = |n| read(&format!(r#"{{"name":"a","writes":{{"k":{}}}}}"#, nested(n))).map(|_| ());
        for accepted in [127, 128] {
            assert_eq!(input(accepted), Ok(()));
            assert_eq!(variable(accepted), Ok(()));
        }
        for refused in [129, 100_000] {
            assert_eq!(input(refused), Err("json_too_deep input 128".to_owned()));
            assert_eq!(variable(refused), Err("json_too_deep writes.k 128".to_owned()));
        }
    }

    #[test]
    fn a_position_counts_from_the_first_byte_sent() {
        let detail = |text: &[u8]| match start(text, &Limits::default(), 4) {
            Ok(_) => "accepted".to_owned(),
            Err(problem) => problem.document_detail().to_owned(),
        };
        assert!(detail(br#"{"name":"a","input":[1,}"#).contains("at byte 23"));
        assert!(detail(b"{\"name\":\"a\xff\"}").contains("at byte 10"));
        assert!(detail(br#"{"name":"a","input":{"k":1,"k":2}}"#).contains("at byte 27"));
        assert!(detail(br#"{"name":"a","input":"\ud800"}"#).contains("at byte 21"));
    }
}
