//! JSON from outside, against serde_json and against a model of what JSON means.
//!
//! `PROPTEST_CASES=100000 cargo test --release --test json` looks longer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use steadfast_core::json::{Json, JsonError};

// ---- What a text means.

/// A JSON value up to spelling: numbers are exact, members have no order.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Meaning {
    Null,
    Bool(bool),
    /// `digits` times ten to `exponent`; the digits neither begin nor end with 0, and zero has none.
    Number {
        negative: bool,
        digits: String,
        exponent: i128,
    },
    Text(String),
    List(Vec<Meaning>),
    Object(BTreeMap<String, Meaning>),
}

fn number(negative: bool, digits: &str, exponent: i128) -> Meaning {
    let trimmed = digits.trim_end_matches('0');
    let exponent = exponent + (digits.len() - trimmed.len()) as i128;
    let digits = trimmed.trim_start_matches('0').to_owned();
    if digits.is_empty() {
        return Meaning::Number { negative: false, digits, exponent: 0 };
    }
    Meaning::Number { negative, digits, exponent }
}

fn any_number() -> impl Strategy<Value = Meaning> {
    let huge = 900_000_000_000_000_000i64;
    let exponent = prop_oneof![4 => -3..4i64, 1 => -400..400i64, 1 => -huge..huge];
    let digits = prop_oneof![4 => "[0-9]{1,2}", 1 => "[0-9]{1,40}", 1 => Just("18446744073709551617".to_owned())];
    (any::<bool>(), digits, exponent)
        .prop_map(|(negative, digits, exponent)| number(negative, &digits, exponent.into()))
}

fn any_text() -> impl Strategy<Value = String> {
    let odd = "[\\x00-\\x1f\u{e9}\u{301}\u{ff5e}\u{1f600}\u{d7ff}\u{e000}\u{10ffff}]{0,10}";
    prop_oneof![4 => "[ab/\"\\\\]{0,2}", 1 => ".{0,12}", 1 => odd]
}

fn any_key() -> impl Strategy<Value = String> {
    any_text().prop_map(|text| text.replace('\0', ""))
}

/// About as many members as are still compared pairwise, or more. (A map strategy with a least size would reject.)
fn any_members<T: fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = BTreeMap<String, T>> {
    let key = prop_oneof![1 => any_key(), 3 => "[a-z]{1,2}"];
    vec((key, value), 15..32).prop_map(|members| members.into_iter().collect())
}

/// Small values of few kinds, so that two of them are often equal or nearly so.
fn any_meaning() -> impl Strategy<Value = Meaning> {
    let scalar = prop_oneof![
        1 => Just(Meaning::Null),
        1 => any::<bool>().prop_map(Meaning::Bool),
        3 => any_number(),
        3 => any_text().prop_map(Meaning::Text),
    ];
    scalar.prop_recursive(5, 60, 6, |inner| {
        prop_oneof![
            3 => vec(inner.clone(), 0..5).prop_map(Meaning::List),
            3 => vec((any_key(), inner.clone()), 0..5).prop_map(|members| Meaning::Object(members.into_iter().collect())),
            1 => any_members(inner).prop_map(Meaning::Object),
        ]
    })
}

// ---- Spelling a meaning in one of many ways.

/// Chooses among equal spellings; the same seed chooses the same.
struct Spelling(u64);

impl Spelling {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn space(&mut self) -> &'static str {
        ["", "", "", " ", "\n", "\t \r\n"][self.below(6)]
    }

    fn number(&mut self, negative: bool, digits: &str, exponent: i128) -> String {
        let zeros = self.below(4);
        let places = self.below(4);
        let zero = digits.is_empty();
        // Zero is any row of zeros with any exponent.
        let exponent = if zero { self.below(20) as i128 - 10 } else { exponent - zeros as i128 + places as i128 };
        let digits = format!("{digits}{}", "0".repeat(zeros));
        let digits = format!("{digits:0>width$}", width = places + 1);
        let (whole, fraction) = digits.split_at(digits.len() - places);
        let whole = whole.trim_start_matches('0');
        let mut text = String::new();
        if negative || zero && self.below(2) == 0 {
            text.push('-');
        }
        text.push_str(if whole.is_empty() { "0" } else { whole });
        if !fraction.is_empty() {
            text.push('.');
            text.push_str(fraction);
        }
        if exponent != 0 || self.below(3) == 0 {
            text.push(['e', 'E'][self.below(2)]);
            text.push_str(if exponent < 0 { "-" } else { ["", "+"][self.below(2)] });
            text.push_str(&"0".repeat(self.below(3)));
            text.push_str(&exponent.unsigned_abs().to_string());
        }
        text
    }

    fn text(&mut self, text: &str) -> String {
        let mut spelled = "\"".to_owned();
        for character in text.chars() {
            let short = match character {
                '"' | '\\' | '/' => Some(character),
                '\u{8}' => Some('b'),
                '\u{c}' => Some('f'),
                '\n' => Some('n'),
                '\r' => Some('r'),
                '\t' => Some('t'),
                _ => None,
            };
            let plain = character >= ' ' && character != '"' && character != '\\';
            match (self.below(4), short) {
                (0 | 1, _) if plain => spelled.push(character),
                (0..3, Some(short)) => spelled.extend(['\\', short]),
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let hex = if self.below(2) == 0 { format!("{unit:04x}") } else { format!("{unit:04X}") };
                        spelled.push_str("\\u");
                        spelled.push_str(&hex);
                    }
                }
            }
        }
        spelled.push('"');
        spelled
    }

    fn value(&mut self, meaning: &Meaning) -> String {
        let text = match meaning {
            Meaning::Null => "null".to_owned(),
            Meaning::Bool(bool) => bool.to_string(),
            Meaning::Number { negative, digits, exponent } => self.number(*negative, digits, *exponent),
            Meaning::Text(text) => self.text(text),
            Meaning::List(items) => {
                let items: Vec<String> = items.iter().map(|item| self.value(item)).collect();
                format!("[{}{}]", items.join(","), self.space())
            }
            Meaning::Object(members) => {
                let mut spelled = Vec::new();
                for (key, value) in members {
                    let member = format!("{}{}{}:{}", self.space(), self.text(key), self.space(), self.value(value));
                    spelled.insert(self.below(spelled.len() + 1), member);
                }
                format!("{{{}{}}}", spelled.join(","), self.space())
            }
        };
        format!("{}{text}{}", self.space(), self.space())
    }
}

fn spell(meaning: &Meaning, seed: u64) -> String {
    Spelling(seed).value(meaning)
}

// ---- Reading the canonical form back, which is what shows that no two meanings share one.

fn decode(bytes: &mut &[u8]) -> Meaning {
    match take(bytes, 1)[0] {
        b'n' => Meaning::Null,
        b'f' => Meaning::Bool(false),
        b't' => Meaning::Bool(true),
        b's' => Meaning::Text(decode_text(bytes)),
        b'd' => {
            let text = decode_text(bytes);
            let (digits, exponent) = text.split_once('e').unwrap();
            let (negative, digits) = digits.strip_prefix('-').map_or((false, digits), |digits| (true, digits));
            let normal = text == "0e0" || !digits.starts_with('0') && !digits.ends_with('0');
            assert!(normal && !digits.is_empty(), "{text} is not normalised");
            number(negative, digits, exponent.parse().unwrap())
        }
        b'a' => Meaning::List((0..decode_length(bytes)).map(|_| decode(bytes)).collect()),
        b'o' => {
            let count = decode_length(bytes);
            let mut members = Vec::new();
            for _ in 0..count {
                let Meaning::Text(key) = decode(bytes) else { panic!("a key is no string") };
                members.push((key, decode(bytes)));
            }
            assert!(members.windows(2).all(|pair| pair[0].0.as_bytes() < pair[1].0.as_bytes()), "keys are not sorted");
            Meaning::Object(members.into_iter().collect())
        }
        other => panic!("{other} is no tag"),
    }
}

fn decode_length(bytes: &mut &[u8]) -> usize {
    u64::from_be_bytes(take(bytes, 8).try_into().unwrap()) as usize
}

fn decode_text(bytes: &mut &[u8]) -> String {
    let length = decode_length(bytes);
    String::from_utf8(take(bytes, length).to_vec()).unwrap()
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (head, rest) = bytes.split_at(count);
    *bytes = rest;
    head
}

fn canonical(text: &str) -> Vec<u8> {
    Json::parse(text).unwrap().canonical()
}

/// The value in billionths, by moving the point: small literals only, and nothing shared with the code under test.
fn billionths(literal: &str) -> i128 {
    let (mantissa, exponent) = literal.split_once('e').unwrap_or((literal, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let shift = 9 + exponent.parse::<i32>().unwrap() - fraction.len() as i32;
    let digits: i128 = format!("{whole}{fraction}").parse().unwrap();
    digits * 10i128.pow(shift as u32)
}

const SMALL_NUMBER: &str = "-?(0|[1-9][0-9]?)(\\.[0-2]{1,3})?(e[+-]?[0-3])?";

proptest! {
    #[test]
    fn the_canonical_form_says_what_the_text_means(meaning in any_meaning(), seed: u64) {
        let text = spell(&meaning, seed);
        let bytes = canonical(&text);
        let mut rest = bytes.as_slice();
        prop_assert_eq!(decode(&mut rest), meaning, "{}", text);
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn spelling_does_not_reach_the_canonical_form(meaning in any_meaning(), one: u64, other: u64) {
        let (one, other) = (spell(&meaning, one), spell(&meaning, other));
        prop_assert_eq!(canonical(&one), canonical(&other), "{} and {}", one, other);
    }

    #[test]
    fn forms_are_equal_exactly_if_meanings_are(one in any_meaning(), other in any_meaning(), seed: u64) {
        let (first, second) = (spell(&one, seed), spell(&other, !seed));
        prop_assert_eq!(canonical(&first) == canonical(&second), one == other, "{} and {}", first, second);
    }

    #[test]
    fn small_numbers_are_equal_exactly_if_their_billionths_are(one in SMALL_NUMBER, other in SMALL_NUMBER) {
        let equal = billionths(&one) == billionths(&other);
        prop_assert_eq!(canonical(&one) == canonical(&other), equal, "{} and {}", one, other);
    }

    #[test]
    fn members_are_the_object(meaning in any_meaning(), seed: u64) {
        let json = Json::parse(&spell(&meaning, seed)).unwrap();
        match (json.members(), meaning) {
            (Some(members), Meaning::Object(expected)) => {
                prop_assert_eq!(members.len(), expected.len());
                for (key, value) in members {
                    prop_assert_eq!(&decode(&mut value.canonical().as_slice()), &expected[&key]);
                    prop_assert_eq!(Json::parse(value.as_str()), Ok(value));
                }
            }
            (members, meaning) => prop_assert!(members.is_none() && !matches!(meaning, Meaning::Object(_))),
        }
    }

    #[test]
    fn what_serde_writes_is_kept_and_read_back(value in any_value()) {
        let text = value.to_string();
        let json = Json::parse(&text).unwrap();
        prop_assert_eq!(json.as_str(), &text);
        prop_assert_eq!(&json.to::<Value>().unwrap(), &value);
        prop_assert_eq!(&Json::from_serialize(&value).unwrap(), &json);
        prop_assert_eq!(serde_json::to_string(&json).unwrap(), text);
        let pretty = Json::parse(&serde_json::to_string_pretty(&value).unwrap()).unwrap();
        prop_assert_eq!(pretty.canonical(), json.canonical());
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        // Eighths survive serde_json's own reading, which may miss the last bit of longer fractions.
        any::<i32>().prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)),
        any_text().prop_map(Value::from),
    ];
    scalar.prop_recursive(6, 80, 8, |inner| {
        prop_oneof![
            3 => vec(inner.clone(), 0..8).prop_map(Value::from),
            3 => vec((any_key(), inner.clone()), 0..8).prop_map(|members| members.into_iter().collect()),
            1 => any_members(inner).prop_map(|members| members.into_iter().collect()),
        ]
    })
}

// ---- Damaged texts, judged by serde_json.

/// Reads everything there is with serde_json, and refuses repeated and NUL keys on top of it.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(Strict)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Strict)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut keys = BTreeSet::new();
        while let Some(key) = members.next_key::<String>()? {
            if key.contains('\0') {
                return Err(A::Error::custom("nul in key"));
            }
            if !keys.insert(key) {
                return Err(A::Error::custom("key twice"));
            }
            members.next_value_seed(Strict)?;
        }
        Ok(())
    }
}

fn strict(text: &str) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Strict.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// Where we and serde_json differ, it is for a reason from the module page.
fn judge(text: &str) -> Result<(), TestCaseError> {
    let syntax = serde_json::from_str::<IgnoredAny>(text);
    let strict = strict(text);
    let ours = Json::parse(text);
    match &ours {
        Ok(json) => {
            prop_assert!(syntax.is_ok(), "{:?}", text);
            // serde_json reads numbers into floats and stops one level earlier; we keep both.
            let limits = ["number out of range", "recursion limit"];
            let beyond_serde =
                |error: &serde_json::Error| limits.iter().any(|limit| error.to_string().starts_with(limit));
            prop_assert!(strict.as_ref().err().is_none_or(beyond_serde), "{:?} is {:?}", text, strict);
            prop_assert_eq!(&Json::from_bytes(json.as_str().as_bytes()), &ours);
            prop_assert_ne!(json.canonical()[0], b'!');
        }
        Err(JsonError::Syntax { what, .. }) if what.starts_with("exponent out of range") => {}
        Err(JsonError::TooDeep { limit, .. }) => prop_assert_eq!(*limit, 128),
        Err(JsonError::Syntax { .. }) => prop_assert!(syntax.is_err(), "{:?} gives {:?}", text, ours),
        Err(JsonError::DuplicateKey { .. } | JsonError::LoneSurrogate { .. } | JsonError::NulInKey { .. }) => {
            prop_assert!(strict.is_err(), "{:?} gives {:?}", text, ours);
        }
        Err(JsonError::NotUtf8 { .. } | JsonError::Unserializable) => {
            prop_assert!(false, "{:?} gives {:?}", text, ours);
        }
    }
    Ok(())
}

#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    Insert(Index, &'static str),
    Remove(Index),
    Cut(Index),
    /// Copies a piece to another place: that is how keys come twice.
    Copy(Index, usize, Index),
}

const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u",
    "\\ud83d",
    "\\ude00",
    "\\u0000",
    "\\u0061",
    "0",
    "1",
    "-",
    "+",
    ".",
    "e",
    "E5",
    "e99999999999",
    "null",
    "true",
    " ",
    "\n",
    "\t",
    "\0",
    "\u{1f}",
    "a",
    "\"a\":1,",
    "\"\":",
    "é",
    "\u{feff}",
];

fn any_damage() -> impl Strategy<Value = Damage> {
    let index = any::<Index>;
    prop_oneof![
        2 => (index(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        2 => (index(), 0x20..0x7fu8).prop_map(|(at, byte)| Damage::Set(at, byte)),
        6 => (index(), select(PIECES)).prop_map(|(at, piece)| Damage::Insert(at, piece)),
        3 => index().prop_map(Damage::Remove),
        1 => index().prop_map(Damage::Cut),
        3 => (index(), 1..12usize, index()).prop_map(|(from, length, to)| Damage::Copy(from, length, to)),
    ]
}

fn inflict(damage: &Damage, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    match damage {
        Damage::Set(at, byte) => *at.get_mut(bytes) = *byte,
        Damage::Insert(at, piece) => {
            let at = at.index(bytes.len() + 1);
            bytes.splice(at..at, piece.bytes());
        }
        Damage::Remove(at) => {
            bytes.remove(at.index(bytes.len()));
        }
        Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Damage::Copy(from, length, to) => {
            let from = from.index(bytes.len());
            let piece = bytes[from..bytes.len().min(from + length)].to_vec();
            let to = to.index(bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
    }
}

const TOKENS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"a\"",
    "\"\\u0061\"",
    "\"b\"",
    "\"\\ud800\"",
    "0",
    "-1.5e3",
    "1e400",
    "null",
    " ",
];

proptest! {
    #[test]
    fn damaged_texts_are_judged_as_serde_does(
        meaning in any_meaning(), seed: u64, damages in vec(any_damage(), 0..4),
    ) {
        let mut bytes = spell(&meaning, seed).into_bytes();
        for damage in &damages {
            inflict(damage, &mut bytes);
        }
        match str::from_utf8(&bytes) {
            Ok(text) => judge(text)?,
            Err(error) => {
                prop_assert_eq!(Json::from_bytes(&bytes), Err(JsonError::NotUtf8 { offset: error.valid_up_to() }));
            }
        }
    }

    /// Special bytes at every place of an eight byte word: the scanner reads strings by words.
    #[test]
    fn strings_are_judged_as_serde_does(
        before in "[a\x7f\u{e9}\u{1f600}\u{a0}!#]{0,20}", special in "[\"\\\\\x00\x1f\x20n]{0,2}", after in "[a-c\u{e9}\u{80}]{0,12}",
    ) {
        judge(&format!("\"{before}{special}{after}\""))?;
    }

    #[test]
    fn rows_of_tokens_are_judged_as_serde_does(tokens in vec(select(TOKENS), 0..12)) {
        judge(&tokens.concat())?;
    }
}

// ---- The table of bad input.

fn nested(open: &str, inside: &str, close: &str, depth: usize) -> String {
    format!("{}{inside}{}", open.repeat(depth), close.repeat(depth))
}

#[test]
fn bad_input() {
    let table: Vec<(&str, String, &str)> = vec![
        ("127 arrays", nested("[", "", "]", 127), "kept"),
        ("128 arrays", nested("[", "1", "]", 128), "kept"),
        ("129 arrays", nested("[", "", "]", 129), "json_too_deep"),
        ("128 objects", nested("{\"a\":", "{}", "}", 127), "kept"),
        ("129 objects", nested("{\"a\":", "{}", "}", 128), "json_too_deep"),
        ("128 mixed", nested("[{\"a\":", "1", "}]", 64), "kept"),
        ("129 mixed", nested("[{\"a\":", "[]", "}]", 64), "json_too_deep"),
        ("a million arrays, cut off", "[".repeat(1_000_000), "json_too_deep"),
        ("2^53+1", "9007199254740993".into(), "kept"),
        ("2^64+1", "18446744073709551617".into(), "kept"),
        ("10,000 digits", "7".repeat(10_000), "kept"),
        ("10,000 digits after the point", format!("0.{}", "3".repeat(10_000)), "kept"),
        ("beyond any float", "-1e400".into(), "kept"),
        ("18 digits of exponent", "1e-999999999999999999".into(), "kept"),
        ("19 digits of exponent", "1e1000000000000000000".into(), "invalid_json"),
        ("10,000 digits of exponent", format!("1e{}", "9".repeat(10_000)), "invalid_json"),
        ("10,000 zeros of exponent", format!("1e{}", "0".repeat(10_000)), "kept"),
        ("escaped NUL in a value", r#"{"a":"\u0000"}"#.into(), "kept"),
        ("escaped NUL in a key", r#"{"\u0000":1}"#.into(), "invalid_json"),
        ("escaped NUL in an inner key", r#"[{"a":{"b\u0000c":1}}]"#.into(), "invalid_json"),
        ("a backslash and u0000 in a key", r#"{"\\u0000":1}"#.into(), "kept"),
        ("key twice", r#"{"a":1,"b":2,"a":1}"#.into(), "invalid_json"),
        ("key twice, once with escapes", r#"{"ab":1,"\u0061\u0062":2}"#.into(), "invalid_json"),
        ("key twice, hex in both cases", r#"{"\u00EF":1,"\u00ef":2}"#.into(), "invalid_json"),
        ("key twice, deep inside", r#"[[{"x":[{"a":1,"a":2}]}]]"#.into(), "invalid_json"),
        ("key in parent and child", r#"{"a":{"a":1},"b":{"a":2}}"#.into(), "kept"),
        ("surrogate pair", r#""\ud83d\ude00""#.into(), "kept"),
        ("lone high surrogate", r#""\ud83d""#.into(), "invalid_json"),
        ("lone low surrogate", r#""\ude00""#.into(), "invalid_json"),
        ("surrogates in the wrong order", r#""\ude00\ud83d""#.into(), "invalid_json"),
        ("lone surrogate in a key", r#"{"\ud83d":1}"#.into(), "invalid_json"),
        ("raw NUL in a string", "\"\0\"".into(), "invalid_json"),
        ("raw line feed in a string", "\"\n\"".into(), "invalid_json"),
        ("raw DEL in a string", "\"\u{7f}\"".into(), "kept"),
        ("byte order mark", "\u{feff}{}".into(), "invalid_json"),
        ("byte order mark in a string", "\"\u{feff}\"".into(), "kept"),
        ("nothing", "".into(), "invalid_json"),
        ("spaces", "  ".into(), "invalid_json"),
        ("trailing garbage", "{}x".into(), "invalid_json"),
        ("two values", "1\n2".into(), "invalid_json"),
        ("leading zero", "01".into(), "invalid_json"),
        ("leading zero after minus", "-012".into(), "invalid_json"),
        ("plus", "+1".into(), "invalid_json"),
        ("no digit before the point", ".5".into(), "invalid_json"),
        ("no digit after the point", "1.".into(), "invalid_json"),
        ("NaN", "NaN".into(), "invalid_json"),
        ("Infinity", "[-Infinity]".into(), "invalid_json"),
        ("undefined", "undefined".into(), "invalid_json"),
        ("hexadecimal", "0x1".into(), "invalid_json"),
        ("single quotes", "{'a':1}".into(), "invalid_json"),
        ("key without quotes", "{a:1}".into(), "invalid_json"),
        ("trailing comma", "[1,]".into(), "invalid_json"),
        ("comment", "[1/*one*/]".into(), "invalid_json"),
    ];
    for (name, text, expected) in table {
        let parsed = Json::parse(&text);
        assert_eq!(parsed.as_ref().map_or_else(JsonError::code, |_| "kept"), expected, "{name}");
        assert!(parsed.is_err() || parsed.is_ok_and(|json| json.as_str() == text), "{name}");
    }
}

#[test]
fn every_beginning_of_a_text_is_refused() {
    let text = r#"{"a":[1.5e-3,true,null,"x\ud83d\ude00\n"],"b":{"c":""}}"#;
    for end in 0..text.len() {
        assert_eq!(Json::parse(&text[..end]).map_err(|error| error.code()), Err("invalid_json"), "{}", &text[..end]);
    }
    assert!(Json::parse(text).is_ok());
}
