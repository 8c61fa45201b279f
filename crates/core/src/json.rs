//! JSON: the one place where a text from outside becomes trusted.
//!
//! Inputs, scratchpad values, signals and results are JSON texts that belong to the user. We keep each one byte for
//! byte as it came and never pass it through a tree of doubles: 2^64 and 2^64+1 stay two numbers. What we do need
//! to know, that it is JSON and whether two texts mean the same, is found out here.
//!
//! # What is accepted
//!
//! One value in the strict syntax of RFC 8259, with five rules on top. Whoever holds a [`Json`] may rely on them.
//!
//! | rule | why | refused as |
//! |---|---|---|
//! | no key twice in an object, compared after unescaping | readers disagree about which one counts | `invalid_json` |
//! | no half of a surrogate pair, in keys or values | it is no character and cannot be written as UTF-8 | `invalid_json` |
//! | no `\u0000` in keys (it is kept in values) | keys are taken out as names, and PostgreSQL keeps no NUL in a text | `invalid_json` |
//! | no exponent of more than 18 digits (leading zeros aside) | the arithmetic below stays exact | `invalid_json` |
//! | at most [`DEPTH_MAX`] arrays and objects inside one another | readers that recurse have a stack | `json_too_deep` |
//!
//! A scalar has depth 0, `[]` has depth 1; depth 128 is accepted and 129 refused. Integers of any size, decimals
//! and exponents are kept as written. The first problem in reading order is reported, with one exception: in an
//! object of more than 16 keys a duplicate is only noticed at its closing brace.
//!
//! Scanning is one pass without recursion. The keys of an object are compared with each other while they are few
//! and sorted once when they are many, so no input costs more than `n log n`.
//!
//! # Canonical form, version 1
//!
//! Two texts that mean the same have the same canonical bytes, and two that differ in meaning have different ones.
//! Fingerprints are taken over these bytes, so a change here is a new [`CANONICAL_VERSION`]. A length or count is
//! 8 bytes, big endian.
//!
//! | value | bytes |
//! |---|---|
//! | null, false, true | `n`, `f`, `t` |
//! | number | `d`, length, normalised decimal |
//! | string | `s`, length in bytes, its characters as UTF-8 |
//! | array | `a`, count, every item in order |
//! | object | `o`, count, every member as its key (like a string) and its value, sorted by the key's UTF-8 bytes |
//!
//! **Numbers** are exact decimals: an optional `-`, digits without leading or trailing zeros, `e`, the exponent.
//! `1`, `1.0`, `1e0` and `10e-1` are all `1e0`; `-1250` is `-125e1`; `0.05` is `5e-2`. Zero is `0e0`, and `-0`
//! equals `0`: they are one number, and a client that writes its request anew may lose the sign (JavaScript does).
//! **Strings** are sequences of code points: `A` equals its escape `\u0041`, but nothing is normalised, so a
//! composed and a decomposed `é` differ. **Nothing** is added or left out: null, `""` and an absent member are three things.
//!
//! *Why no two meanings collide.* The first byte tells the shape, and the length or count tells how far it reaches,
//! so a reader of the bytes always knows where a value ends and what it was: the form can be decoded. It follows
//! that no form is the beginning of another, so values fed one after the other need nothing between them.
//! The normalised decimal is unique because a decimal other than zero has exactly one digit string that neither
//! starts nor ends with 0, and exponents are summed in 128 bits, which 18 digits and the length of a text cannot leave.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// How many arrays and objects may stand inside one another unless the caller says otherwise.
pub const DEPTH_MAX: usize = 128;

/// Names the rules of [`Json::feed_canonical`]; stored beside whatever is derived from its bytes.
pub const CANONICAL_VERSION: u8 = 1;

/// A JSON text that has been checked; kept byte for byte as it was received, without the whitespace around it.
///
/// Cheap to clone. Two are equal when their bytes are; for equal meaning compare the canonical forms.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Json(Arc<str>);

impl Json {
    /// Checks a text from outside, up to [`DEPTH_MAX`] deep.
    pub fn parse(text: &str) -> Result<Json, JsonError> {
        Json::parse_within(text, DEPTH_MAX)
    }

    /// Checks a text from outside, up to `depth_max` deep; 0 admits scalars only.
    pub fn parse_within(text: &str, depth_max: usize) -> Result<Json, JsonError> {
        check(text, depth_max)?;
        Ok(Json(Arc::from(text.trim_matches(WHITESPACE))))
    }

    /// Checks bytes from outside, up to [`DEPTH_MAX`] deep. Offsets in errors count from the first of them.
    pub fn from_bytes(bytes: &[u8]) -> Result<Json, JsonError> {
        let text = str::from_utf8(bytes).map_err(|source| JsonError::NotUtf8 { offset: source.valid_up_to() })?;
        Json::parse(text)
    }

    /// Serialises a Rust value and checks the result like any text from outside.
    ///
    /// serde_json writes a float that is NaN or infinite as null; this is no error here either.
    pub fn from_serialize<T: Serialize + ?Sized>(value: &T) -> Result<Json, JsonError> {
        // The message is dropped on purpose: it is written by the value's own type and may quote its contents.
        let text = serde_json::to_string(value).map_err(|_| JsonError::Unserializable)?;
        Json::parse(&text)
    }

    /// Takes over a text that was a `Json` when it was stored. Checked in debug builds only.
    ///
    /// Should the store have damaged it so that it is no JSON, a release build does not panic: serialising it and
    /// [`to`](Json::to) fail, [`members`](Json::members) finds none, and [`feed_canonical`](Json::feed_canonical)
    /// tells it from every sound text.
    pub fn trusted(text: impl Into<Arc<str>>) -> Json {
        let text = text.into();
        // The depth is left out: it was measured against the limit of the day it was stored.
        debug_assert!(check(&text, usize::MAX).is_ok(), "a stored text of {} bytes is not JSON", text.len());
        Json(text)
    }

    /// The value `null`.
    pub fn null() -> Json {
        Json(Arc::from("null"))
    }

    /// The text as it was received.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The size in bytes, which is what limits on values count.
    #[expect(clippy::len_without_is_empty, reason = "a JSON text is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether this is the value `null`.
    pub fn is_null(&self) -> bool {
        self.as_str() == "null"
    }

    /// Reads the text into a Rust type.
    ///
    /// The error is serde_json's and may quote the text, so it belongs to the owner of the data and not into a log.
    /// Types that recurse, such as `serde_json::Value`, are refused by serde_json from depth 128 on.
    pub fn to<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.as_str())
    }

    /// The members of an object in the order they were written; `None` if this is no object.
    pub fn members(&self) -> Option<Vec<(String, Json)>> {
        if !self.as_str().starts_with('{') {
            return None;
        }
        let tape = Tape::read(self.as_str()).ok()?;
        let member =
            |(key, value): (usize, usize)| (tape.string(key).into_owned(), Json(Arc::from(tape.text_of(value))));
        Some(tape.members(0).map(member).collect())
    }

    /// Feeds the canonical form (see the [module page](self)) to `sink`, piece by piece.
    ///
    /// ```
    /// # use {sha2::{Digest, Sha256}, steadfast_core::json::Json};
    /// let digest = |text| {
    ///     let mut hash = Sha256::new();
    ///     Json::parse(text).unwrap().feed_canonical(&mut |bytes| hash.update(bytes));
    ///     hash.finalize()
    /// };
    /// assert_eq!(digest(r#"{"a": 1.0, "b": []}"#), digest(r#"{"b":[],"\u0061":1}"#));
    /// assert_ne!(digest("18446744073709551616"), digest("18446744073709551617"));
    /// ```
    ///
    /// Holds up to 100 bytes for every key and value of the text while it runs. A stored text that was damaged (see
    /// [`trusted`](Json::trusted)) is fed as `!`, length, bytes, which is the form of no JSON.
    pub fn feed_canonical(&self, sink: &mut impl FnMut(&[u8])) {
        match Tape::read(self.as_str()) {
            Ok(tape) => tape.feed_canonical(sink),
            Err(_) => feed_framed(b'!', self.as_str().as_bytes(), sink),
        }
    }

    /// The canonical form in one piece, for texts known to be small and for tests.
    pub fn canonical(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len() * 2);
        self.feed_canonical(&mut |piece| bytes.extend_from_slice(piece));
        bytes
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The size and never the contents: a `Json` is the user's data, and debug output ends in logs.
impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Json({} bytes)", self.len())
    }
}

/// Embeds the text verbatim. Only serde_json can do so.
///
/// A `RawValue` cannot be had from a checked text without scanning it once more. We let it: should the store have
/// damaged the text, this fails instead of breaking the document around it.
impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let raw: &RawValue = serde_json::from_str(self.as_str())
            .map_err(|_| S::Error::custom("write a stored JSON text: it is damaged"))?;
        raw.serialize(serializer)
    }
}

/// Takes the text verbatim and checks it like [`Json::parse`]. Only serde_json can do so, and not below
/// `#[serde(flatten)]`, `untagged` or `tag`, which hand on values that have lost their text.
///
/// A field of type `Option<Json>` reads null as `None`, for that is decided by `Option`. Where null and absent differ,
/// give the field `default` and a `deserialize_with` that calls `Json::deserialize(..).map(Some)`.
///
/// Offsets in the error count from the beginning of this value, and its code is lost in serde's error type: who
/// answers with codes checks the whole document first.
impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Json::parse(raw.get()).map_err(D::Error::custom)
    }
}

/// Why a text is not taken as JSON. Tells the place and the rule, never what stands there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// The text breaks the grammar, is cut off, or goes on after the value.
    #[error("read JSON at byte {offset}: {what}")]
    Syntax {
        /// The first byte that does not fit; the length of the text if it is cut off.
        offset: usize,
        /// What is wrong there, and what would be right.
        what: &'static str,
    },
    /// An object names the same member twice.
    #[error(
        "read JSON at byte {offset}: this key stands in the object already, perhaps escaped differently; keep one of the two"
    )]
    DuplicateKey {
        /// The opening quote of the second one.
        offset: usize,
    },
    /// A `\u` escape names one half of a surrogate pair and the other half is missing.
    #[error(
        "read JSON at byte {offset}: half of a surrogate pair; escape both halves, or send the character itself as UTF-8"
    )]
    LoneSurrogate {
        /// The backslash of the escape.
        offset: usize,
    },
    /// An object key contains the character NUL.
    #[error("read JSON at byte {offset}: \\u0000 in an object key; it is kept in values only, so rename the key")]
    NulInKey {
        /// The backslash of the escape.
        offset: usize,
    },
    /// Too many arrays and objects inside one another.
    #[error(
        "read JSON at byte {offset}: nested deeper than the limit of {limit} arrays and objects; flatten it, or send the inner part as a string"
    )]
    TooDeep {
        /// The bracket that goes beyond the limit.
        offset: usize,
        /// The greatest depth accepted.
        limit: usize,
    },
    /// The bytes are not UTF-8.
    #[error("read JSON at byte {offset}: not UTF-8; send the text in that encoding")]
    NotUtf8 {
        /// The first byte that belongs to no character.
        offset: usize,
    },
    /// A Rust value could not be written as JSON.
    #[error(
        "write a value as JSON: its type refused; map keys must be strings, numbers or unit variants, and no serialize function may fail"
    )]
    Unserializable,
}

impl JsonError {
    /// The stable word for this in answers to clients.
    pub fn code(&self) -> &'static str {
        match self {
            JsonError::TooDeep { .. } => "json_too_deep",
            JsonError::Syntax { .. }
            | JsonError::DuplicateKey { .. }
            | JsonError::LoneSurrogate { .. }
            | JsonError::NulInKey { .. }
            | JsonError::NotUtf8 { .. }
            | JsonError::Unserializable => "invalid_json",
        }
    }
}

// ---- Checking: the rules that go beyond syntax and are about more than one token.

/// Whether a text may become a [`Json`].
fn check(text: &str, depth_max: usize) -> Result<(), JsonError> {
    scan(text, depth_max, &mut Keys::default())
}

/// Up to this many keys of one object are compared pairwise, which for so few is faster than sorting them.
const PAIRWISE_MAX: usize = 16;

/// The keys of the objects that are open, to find one that comes twice.
#[derive(Default)]
struct Keys<'a> {
    keys: Vec<Key<'a>>,
    /// Where in `keys` each open object begins, the innermost last.
    objects: Vec<usize>,
}

struct Key<'a> {
    name: Str<'a>,
    offset: usize,
}

impl<'a> Reader<'a> for Keys<'a> {
    #[inline]
    fn open(&mut self, container: Container, _: usize) {
        if container == Container::Object {
            self.objects.push(self.keys.len());
            self.keys.reserve(PAIRWISE_MAX);
        }
    }

    #[inline]
    fn key(&mut self, name: Str<'a>, span: Span) -> Result<(), JsonError> {
        let siblings = &self.keys[self.objects.last().copied().unwrap_or_default()..];
        if siblings.len() < PAIRWISE_MAX && siblings.iter().any(|key| key.name.equals(name)) {
            return Err(JsonError::DuplicateKey { offset: span.start });
        }
        self.keys.push(Key { name, offset: span.start });
        Ok(())
    }

    #[inline]
    fn close(&mut self, container: Container, _: usize) -> Result<(), JsonError> {
        if container == Container::Object {
            let first = self.objects.pop().unwrap_or_default();
            if self.keys.len() - first > PAIRWISE_MAX {
                self.refuse_duplicates(first)?;
            }
            self.keys.truncate(first);
        }
        Ok(())
    }
}

impl Keys<'_> {
    #[cold]
    fn refuse_duplicates(&self, first: usize) -> Result<(), JsonError> {
        let mut keys: Vec<_> = self.keys[first..].iter().map(|key| (key.name.decoded(), key.offset)).collect();
        keys.sort_unstable();
        let second = keys.windows(2).filter(|pair| pair[0].0 == pair[1].0).map(|pair| pair[1].1).min();
        second.map_or(Ok(()), |offset| Err(JsonError::DuplicateKey { offset }))
    }
}

// ---- The canonical form.

/// The values of a text in reading order, a parent before its children. A key is a string among an object's children.
struct Tape<'a> {
    text: &'a str,
    nodes: Vec<Node>,
    /// The containers being read, the innermost last.
    open: Vec<usize>,
}

struct Node {
    kind: Kind,
    span: Span,
    /// The first node that is not below this one.
    after: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Literal,
    Number,
    Str { escaped: bool },
    Container(Container),
}

impl<'a> Tape<'a> {
    fn read(text: &'a str) -> Result<Tape<'a>, JsonError> {
        let mut tape = Tape { text, nodes: Vec::new(), open: Vec::new() };
        // The depth was settled when the text was accepted, and nothing here recurses.
        scan(text, usize::MAX, &mut tape)?;
        Ok(tape)
    }

    fn push(&mut self, kind: Kind, span: Span) {
        let after = self.nodes.len() + 1;
        self.nodes.push(Node { kind, span, after });
    }

    fn text_of(&self, node: usize) -> &'a str {
        &self.text[self.nodes[node].span.start..self.nodes[node].span.end]
    }

    fn string(&self, node: usize) -> Cow<'a, str> {
        let text = self.text_of(node);
        let escaped = matches!(self.nodes[node].kind, Kind::Str { escaped: true });
        Str { raw: &text[1..text.len() - 1], escaped }.decoded()
    }

    fn children(&self, parent: usize) -> impl Iterator<Item = usize> {
        let end = self.nodes[parent].after;
        let mut next = parent + 1;
        std::iter::from_fn(move || {
            let child = (next < end).then_some(next)?;
            next = self.nodes[child].after;
            Some(child)
        })
    }

    /// Key and value of each member, in the order they were written.
    fn members(&self, object: usize) -> impl Iterator<Item = (usize, usize)> {
        let mut children = self.children(object);
        std::iter::from_fn(move || Some((children.next()?, children.next()?)))
    }

    fn feed_canonical(&self, sink: &mut impl FnMut(&[u8])) {
        // What is still to be fed, the next one last.
        let mut todo = vec![0];
        while let Some(node) = todo.pop() {
            match self.nodes[node].kind {
                Kind::Literal => sink(&self.text_of(node).as_bytes()[..1]),
                Kind::Number => feed_number(self.text_of(node), sink),
                Kind::Str { .. } => feed_framed(b's', self.string(node).as_bytes(), sink),
                Kind::Container(Container::Array) => {
                    let first = todo.len();
                    todo.extend(self.children(node));
                    sink(&head(b'a', todo.len() - first));
                    todo[first..].reverse();
                }
                Kind::Container(Container::Object) => {
                    let mut members: Vec<_> =
                        self.members(node).map(|(key, value)| (self.string(key), key, value)).collect();
                    members.sort_by(|a, b| a.0.cmp(&b.0));
                    sink(&head(b'o', members.len()));
                    todo.extend(members.iter().rev().flat_map(|&(_, key, value)| [value, key]));
                }
            }
        }
    }
}

impl<'a> Reader<'a> for Tape<'a> {
    fn open(&mut self, container: Container, start: usize) {
        self.open.push(self.nodes.len());
        self.push(Kind::Container(container), Span { start, end: start });
    }

    fn key(&mut self, key: Str<'a>, span: Span) -> Result<(), JsonError> {
        self.push(Kind::Str { escaped: key.escaped }, span);
        Ok(())
    }

    fn scalar(&mut self, kind: Kind, span: Span) {
        self.push(kind, span);
    }

    fn close(&mut self, _: Container, end: usize) -> Result<(), JsonError> {
        let after = self.nodes.len();
        if let Some(container) = self.open.pop() {
            self.nodes[container].span.end = end;
            self.nodes[container].after = after;
        }
        Ok(())
    }
}

fn head(tag: u8, length: usize) -> [u8; 9] {
    let mut head = [tag; 9];
    head[1..].copy_from_slice(&(length as u64).to_be_bytes());
    head
}

fn feed_framed(tag: u8, bytes: &[u8], sink: &mut impl FnMut(&[u8])) {
    sink(&head(tag, bytes.len()));
    sink(bytes);
}

/// Feeds a literal that the scanner accepted as its normalised decimal.
fn feed_number(literal: &str, sink: &mut impl FnMut(&[u8])) {
    let (sign, unsigned) = literal.split_at(usize::from(literal.starts_with('-')));
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent: i128 = exponent.parse().expect("the scanner admits 18 digits at most");

    // The value is the digits of `whole` and `fraction` in a row, times ten to `exponent`.
    let fraction = fraction.trim_end_matches('0');
    let exponent = exponent - fraction.len() as i128;
    let significant = if fraction.is_empty() { whole.trim_end_matches('0') } else { whole };
    let exponent = exponent + (whole.len() - significant.len()) as i128;
    let whole = significant.trim_start_matches('0');
    let fraction = if whole.is_empty() { fraction.trim_start_matches('0') } else { fraction };

    if whole.is_empty() && fraction.is_empty() {
        return feed_framed(b'd', b"0e0", sink);
    }
    let exponent = format!("e{exponent}");
    sink(&head(b'd', sign.len() + whole.len() + fraction.len() + exponent.len()));
    for piece in [sign, whole, fraction, &exponent] {
        sink(piece.as_bytes());
    }
}

// ---- Scanning: the grammar, and the rules about one token.

/// JSON's whitespace, which is less than Rust's.
const WHITESPACE: [char; 4] = [' ', '\t', '\n', '\r'];

/// An exponent of so many digits cannot overflow whatever is added to it here.
const EXPONENT_DIGITS_MAX: usize = 18;

/// Told what the scanner finds, in reading order. Containers are opened and closed in pairs, and a key is always
/// inside an object.
trait Reader<'a> {
    fn open(&mut self, container: Container, start: usize);
    fn key(&mut self, key: Str<'a>, span: Span) -> Result<(), JsonError>;
    fn scalar(&mut self, _: Kind, _: Span) {}
    fn close(&mut self, container: Container, end: usize) -> Result<(), JsonError>;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

/// Bytes of the text, quotes and brackets included.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

/// A string as it was written, without its quotes. Made by the scanner only, so its escapes are sound.
#[derive(Clone, Copy)]
struct Str<'a> {
    raw: &'a str,
    escaped: bool,
}

impl<'a> Str<'a> {
    #[inline]
    fn equals(self, other: Str<'a>) -> bool {
        if self.escaped || other.escaped {
            return self.chars().eq(other.chars());
        }
        // Sibling keys are often of one length and alike in front (`item_1`, `item_2`): the last byte tells most apart.
        let (a, b) = (self.raw.as_bytes(), other.raw.as_bytes());
        a.len() == b.len() && a.last() == b.last() && a == b
    }

    fn decoded(self) -> Cow<'a, str> {
        if self.escaped { Cow::Owned(self.chars().collect()) } else { Cow::Borrowed(self.raw) }
    }

    fn chars(self) -> impl Iterator<Item = char> {
        let mut raw = self.raw.chars();
        std::iter::from_fn(move || match raw.next()? {
            '\\' => match raw.next()? {
                'b' => Some('\u{8}'),
                'f' => Some('\u{c}'),
                'n' => Some('\n'),
                'r' => Some('\r'),
                't' => Some('\t'),
                'u' => {
                    let mut code = code_unit(&mut raw);
                    if is_high_surrogate(code) {
                        let low = code_unit(raw.by_ref().skip(2));
                        code = 0x1_0000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
                    }
                    char::from_u32(code)
                }
                itself => Some(itself),
            },
            plain => Some(plain),
        })
    }
}

fn code_unit(digits: impl Iterator<Item = char>) -> u32 {
    digits.take(4).fold(0, |code, digit| code << 4 | digit.to_digit(16).unwrap_or_default())
}

fn is_high_surrogate(code: u32) -> bool {
    (0xd800..0xdc00).contains(&code)
}

fn is_low_surrogate(code: u32) -> bool {
    (0xdc00..0xe000).contains(&code)
}

/// Goes through the text once, telling `reader` what stands there.
fn scan<'a>(text: &'a str, depth_max: usize, reader: &mut impl Reader<'a>) -> Result<(), JsonError> {
    let mut scanner = Scanner { text, at: 0 };
    let mut open: Vec<Container> = Vec::new();
    if text.starts_with('\u{feff}') {
        return Err(scanner.wrong("a byte order mark; send the text without it"));
    }
    loop {
        // A value has to begin here.
        scanner.skip_whitespace();
        let start = scanner.at;
        let first = scanner.peek();
        match first {
            b'{' | b'[' => {
                if open.len() >= depth_max {
                    return Err(JsonError::TooDeep { offset: start, limit: depth_max });
                }
                let container = if first == b'{' { Container::Object } else { Container::Array };
                reader.open(container, start);
                open.push(container);
                scanner.at += 1;
                scanner.skip_whitespace();
                match (container, scanner.peek()) {
                    // Nothing in it: closed below.
                    (Container::Object, b'}') | (Container::Array, b']') => {}
                    (Container::Object, _) => {
                        scanner.key(reader)?;
                        continue;
                    }
                    (Container::Array, _) => continue,
                }
            }
            b'"' => {
                let string = scanner.string(Place::Value)?;
                reader.scalar(Kind::Str { escaped: string.escaped }, Span { start, end: scanner.at });
            }
            b'-' | b'0'..=b'9' => {
                scanner.number()?;
                reader.scalar(Kind::Number, Span { start, end: scanner.at });
            }
            b'n' | b't' | b'f' => {
                scanner.literal()?;
                reader.scalar(Kind::Literal, Span { start, end: scanner.at });
            }
            _ => {
                return Err(
                    scanner.wrong("a value should begin here: an object, array, string, number, true, false or null")
                );
            }
        }
        // A value has ended, or an empty container is about to, and with it perhaps the containers around it.
        loop {
            scanner.skip_whitespace();
            let Some(&container) = open.last() else {
                return if scanner.at == text.len() {
                    Ok(())
                } else {
                    Err(scanner.wrong("more text after the value; send one value only"))
                };
            };
            match (container, scanner.peek()) {
                (Container::Object, b',') => {
                    scanner.at += 1;
                    scanner.skip_whitespace();
                    scanner.key(reader)?;
                    break;
                }
                (Container::Array, b',') => {
                    scanner.at += 1;
                    break;
                }
                (Container::Object, b'}') | (Container::Array, b']') => {
                    scanner.at += 1;
                    open.pop();
                    reader.close(container, scanner.at)?;
                }
                (Container::Object, _) => {
                    return Err(scanner.wrong("a comma or the closing brace of the object should stand here"));
                }
                (Container::Array, _) => {
                    return Err(scanner.wrong("a comma or the closing bracket of the array should stand here"));
                }
            }
        }
    }
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Key,
    Value,
}

impl<'a> Scanner<'a> {
    /// The byte at hand. NUL stands for the end: no token begins with it or goes on with it.
    #[inline]
    fn peek(&self) -> u8 {
        self.peek_at(self.at)
    }

    #[inline]
    fn peek_at(&self, at: usize) -> u8 {
        self.text.as_bytes().get(at).copied().unwrap_or_default()
    }

    #[inline]
    fn skip_whitespace(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
    }

    /// A key with its colon, up to where the value may begin.
    #[inline]
    fn key(&mut self, reader: &mut impl Reader<'a>) -> Result<(), JsonError> {
        let start = self.at;
        if self.peek() != b'"' {
            return Err(self.wrong("an object key in double quotes should begin here"));
        }
        let key = self.string(Place::Key)?;
        reader.key(key, Span { start, end: self.at })?;
        self.skip_whitespace();
        if self.peek() != b':' {
            return Err(self.wrong("a colon should follow the object key"));
        }
        self.at += 1;
        Ok(())
    }

    #[inline]
    fn string(&mut self, place: Place) -> Result<Str<'a>, JsonError> {
        let start = self.at + 1;
        let mut escaped = false;
        self.at = start;
        loop {
            self.skip_plain();
            match self.peek() {
                b'"' => {
                    let raw = &self.text[start..self.at];
                    self.at += 1;
                    return Ok(Str { raw, escaped });
                }
                b'\\' => {
                    escaped = true;
                    self.escape(place)?;
                }
                _ => {
                    return Err(
                        self.wrong("a control character in a string; write it as an escape such as \\n or \\u0000")
                    );
                }
            }
        }
    }

    /// Moves on to the next byte that is special in a string: a quote, a backslash, a control character or the end.
    #[inline]
    fn skip_plain(&mut self) {
        // Eight bytes at a time: a borrow out of `byte - n` reaches its top bit exactly if the byte was below n.
        const ONES: u64 = u64::MAX / 0xff;
        const TOPS: u64 = ONES << 7;
        let below = |word: u64, n: u64| word.wrapping_sub(ONES * n) & !word;
        let bytes = self.text.as_bytes();
        while let Some(word) = bytes[self.at..].first_chunk::<8>() {
            let word = u64::from_le_bytes(*word);
            let quote = below(word ^ (ONES * u64::from(b'"')), 1);
            let backslash = below(word ^ (ONES * u64::from(b'\\')), 1);
            let special = (below(word, 0x20) | quote | backslash) & TOPS;
            if special != 0 {
                // A borrow may carry into later bytes, but never into earlier ones: the first mark is right.
                self.at += special.trailing_zeros() as usize / 8;
                return;
            }
            self.at += 8;
        }
        while let Some(&byte) = bytes.get(self.at)
            && byte >= 0x20
            && byte != b'"'
            && byte != b'\\'
        {
            self.at += 1;
        }
    }

    fn escape(&mut self, place: Place) -> Result<(), JsonError> {
        let offset = self.at;
        self.at += 1;
        match self.peek() {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {
                self.at += 1;
                return Ok(());
            }
            b'u' => self.at += 1,
            _ => return Err(self.wrong("no such escape; a backslash itself is written twice")),
        }
        let code = self.hex4()?;
        if code == 0 && place == Place::Key {
            return Err(JsonError::NulInKey { offset });
        }
        if is_high_surrogate(code) && self.peek() == b'\\' && self.peek_at(self.at + 1) == b'u' {
            self.at += 2;
            if is_low_surrogate(self.hex4()?) {
                return Ok(());
            }
            return Err(JsonError::LoneSurrogate { offset });
        }
        if is_high_surrogate(code) || is_low_surrogate(code) {
            return Err(JsonError::LoneSurrogate { offset });
        }
        Ok(())
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut code = 0;
        for _ in 0..4 {
            let Some(digit) = char::from(self.peek()).to_digit(16) else {
                return Err(self.wrong("four hexadecimal digits should follow \\u"));
            };
            code = code << 4 | digit;
            self.at += 1;
        }
        Ok(code)
    }

    #[inline]
    fn number(&mut self) -> Result<(), JsonError> {
        if self.peek() == b'-' {
            self.at += 1;
        }
        if self.peek() == b'0' {
            self.at += 1;
            if self.peek().is_ascii_digit() {
                return Err(self.wrong("a digit after a leading zero; write the number without the zero"));
            }
        } else {
            self.digits("a digit should follow the minus sign")?;
        }
        if self.peek() == b'.' {
            self.at += 1;
            self.digits("a digit should follow the decimal point")?;
        }
        if matches!(self.peek(), b'e' | b'E') {
            self.at += 1;
            if matches!(self.peek(), b'+' | b'-') {
                self.at += 1;
            }
            let start = self.at;
            self.digits("a digit should follow the e of the exponent")?;
            if self.text[start..self.at].trim_start_matches('0').len() > EXPONENT_DIGITS_MAX {
                return Err(JsonError::Syntax { offset: start, what: "exponent out of range; use 18 digits at most" });
            }
        }
        Ok(())
    }

    #[inline]
    fn digits(&mut self, what: &'static str) -> Result<(), JsonError> {
        if !self.peek().is_ascii_digit() {
            return Err(self.wrong(what));
        }
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
        Ok(())
    }

    #[inline]
    fn literal(&mut self) -> Result<(), JsonError> {
        let rest = &self.text.as_bytes()[self.at..];
        for literal in ["null", "true", "false"] {
            if rest.starts_with(literal.as_bytes()) {
                self.at += literal.len();
                return Ok(());
            }
        }
        Err(self.wrong("a value should begin here; the only words are true, false and null"))
    }

    #[cold]
    fn wrong(&self, what: &'static str) -> JsonError {
        if self.at >= self.text.len() {
            return JsonError::Syntax {
                offset: self.text.len(),
                what: "the text ends before the value does; send all of it",
            };
        }
        JsonError::Syntax { offset: self.at, what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a text, in one word and the byte it points at.
    fn verdict(result: Result<Json, JsonError>) -> String {
        match result {
            Ok(_) => "kept".to_owned(),
            Err(JsonError::Syntax { offset, .. }) => format!("syntax at {offset}"),
            Err(JsonError::DuplicateKey { offset }) => format!("duplicate at {offset}"),
            Err(JsonError::LoneSurrogate { offset }) => format!("surrogate at {offset}"),
            Err(JsonError::NulInKey { offset }) => format!("nul at {offset}"),
            Err(JsonError::TooDeep { offset, limit }) => format!("deeper than {limit} at {offset}"),
            Err(JsonError::NotUtf8 { offset }) => format!("utf-8 at {offset}"),
            Err(JsonError::Unserializable) => "unserializable".to_owned(),
        }
    }

    fn check(table: &[(&str, &str)]) {
        for (text, expected) in table {
            assert_eq!(verdict(Json::parse(text)), *expected, "{text}");
        }
    }

    /// The canonical form to read: tags, lengths in decimal, strings and numbers as they are.
    fn shown(text: &str) -> String {
        let bytes = Json::parse(text).unwrap().canonical();
        let mut rest = bytes.as_slice();
        let mut words = Vec::new();
        while let Some((tag, after)) = rest.split_first() {
            let tag = char::from(*tag);
            rest = after;
            if matches!(tag, 'n' | 'f' | 't') {
                words.push(tag.to_string());
                continue;
            }
            let (length, after) = rest.split_first_chunk::<8>().unwrap();
            let length = u64::from_be_bytes(*length) as usize;
            let (body, after) = if matches!(tag, 'a' | 'o') {
                ("", after)
            } else {
                (str::from_utf8(&after[..length]).unwrap(), &after[length..])
            };
            words.push(format!("{tag}{length}{}{body}", if body.is_empty() { "" } else { ":" }));
            rest = after;
        }
        words.join(" ")
    }

    #[test]
    fn grammar() {
        check(&[
            ("null", "kept"),
            (" \t\r\n[ 1 , { } , [ ] , \"\" ]\n", "kept"),
            ("", "syntax at 0"),
            (" ", "syntax at 1"),
            ("nul", "syntax at 0"),
            ("nulll", "syntax at 4"),
            ("True", "syntax at 0"),
            ("NaN", "syntax at 0"),
            ("Infinity", "syntax at 0"),
            ("-Infinity", "syntax at 1"),
            ("'a'", "syntax at 0"),
            ("1 2", "syntax at 2"),
            ("{}{}", "syntax at 2"),
            ("[1,]", "syntax at 3"),
            ("[,1]", "syntax at 1"),
            ("[1 2]", "syntax at 3"),
            ("[1}", "syntax at 2"),
            ("[1", "syntax at 2"),
            ("]", "syntax at 0"),
            ("{\"a\":1,}", "syntax at 7"),
            ("{\"a\" 1}", "syntax at 5"),
            ("{\"a\":}", "syntax at 5"),
            ("{\"a\":1]", "syntax at 6"),
            ("{\"a\":1 \"b\":2}", "syntax at 7"),
            ("{a:1}", "syntax at 1"),
            ("{1:1}", "syntax at 1"),
            ("{\"a\"", "syntax at 4"),
            ("[1] // done", "syntax at 4"),
            // Spaces to Rust, but not to JSON; and a byte order mark.
            ("\u{a0}1", "syntax at 0"),
            ("[\u{c}1]", "syntax at 1"),
            ("1\u{2028}", "syntax at 1"),
            ("\u{feff}1", "syntax at 0"),
            // The scanner's stand-in for the end must not pass as one.
            ("1\0", "syntax at 1"),
            ("\0", "syntax at 0"),
            ("[1\0]", "syntax at 2"),
        ]);
    }

    #[test]
    fn numbers() {
        check(&[
            ("0", "kept"),
            ("-0", "kept"),
            ("9007199254740993", "kept"),
            ("0.1e-7", "kept"),
            ("1E+400", "kept"),
            ("01", "syntax at 1"),
            ("-01", "syntax at 2"),
            ("00", "syntax at 1"),
            ("+1", "syntax at 0"),
            (".5", "syntax at 0"),
            ("1.", "syntax at 2"),
            ("1.e5", "syntax at 2"),
            ("-", "syntax at 1"),
            ("-.5", "syntax at 1"),
            ("1e", "syntax at 2"),
            ("1e+", "syntax at 3"),
            ("1e1.5", "syntax at 3"),
            ("0x10", "syntax at 1"),
            ("1_000", "syntax at 1"),
            ("1e999999999999999999", "kept"),
            ("1e-999999999999999999", "kept"),
            ("1e1000000000000000000", "syntax at 2"),
            ("0e-1000000000000000000", "syntax at 3"),
        ]);
        let zeros = "0".repeat(5000);
        assert_eq!(verdict(Json::parse(&format!("1e{zeros}7"))), "kept");
        assert_eq!(verdict(Json::parse(&format!("1e7{zeros}"))), "syntax at 2");
    }

    #[test]
    fn strings() {
        check(&[
            (r#""""#, "kept"),
            (r#""\" \\ \/ \b \f \n \r \t \u00e9 \uD83D\uDE00""#, "kept"),
            (r#""\u0000""#, "kept"),
            ("\"\u{7f}\u{80}é😀\u{10ffff}\"", "kept"),
            ("\"a\u{0}\"", "syntax at 2"),
            ("\"a\u{1f}\"", "syntax at 2"),
            ("\"a\u{1f}23456789\"", "syntax at 2"),
            ("\"a\n\"", "syntax at 2"),
            ("\"eight by\tte\"", "syntax at 9"),
            ("\"é23456\t\"", "syntax at 8"),
            ("\"a", "syntax at 2"),
            ("\"a\\", "syntax at 3"),
            ("\"a\\\"", "syntax at 4"),
            (r#""\x41""#, "syntax at 2"),
            (r#""\'""#, "syntax at 2"),
            (r#""\u12""#, "syntax at 5"),
            (r#""\u+123""#, "syntax at 3"),
            (r#""\u123g""#, "syntax at 6"),
            (r#""\U0041""#, "syntax at 2"),
            (r#""a\ud800""#, "surrogate at 2"),
            (r#""a\udfff""#, "surrogate at 2"),
            (r#""a\ud800x""#, "surrogate at 2"),
            (r#""a\ud800\n""#, "surrogate at 2"),
            (r#""a\ud800\u0041""#, "surrogate at 2"),
            (r#""a\ud800\ud800\udc00""#, "surrogate at 2"),
            (r#""\ud800\udc00\udc00""#, "surrogate at 13"),
            (r#"{"\udead":1}"#, "surrogate at 2"),
        ]);
    }

    #[test]
    fn object_keys() {
        check(&[
            (r#"{"":1,"a":2,"A":3," a":4}"#, "kept"),
            (r#"{"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]}"#, "kept"),
            // Composed and decomposed are two names.
            (r#"{"\u00e9":1,"e\u0301":2}"#, "kept"),
            (r#"{"a":1,"a":1}"#, "duplicate at 7"),
            (r#"{"a":1,"\u0061":2}"#, "duplicate at 7"),
            (r#"{"\u0061":1,"a":2}"#, "duplicate at 12"),
            (r#"{"\/":1,"/":2}"#, "duplicate at 8"),
            (r#"{"😀":1,"\ud83d\uDE00":2}"#, "duplicate at 10"),
            (r#"{"":1,"":2}"#, "duplicate at 6"),
            (r#"{"a":{"b":1,"c":2},"a":3}"#, "duplicate at 19"),
            (r#"[{"a":1},{"b":{"c":1,"c":2}}]"#, "duplicate at 21"),
            (r#"{"a\u0000":1}"#, "nul at 3"),
            (r#"{"a":"\u0000"}"#, "kept"),
        ]);
    }

    #[test]
    fn a_key_is_found_again_among_few_and_many() {
        for count in [1, 2, 15, 16, 17, 18, 40, 100_000] {
            let mut members: Vec<String> = (0..count).map(|n| format!("\"k{n}\":{{\"k{n}\":0}}")).collect();
            assert_eq!(verdict(Json::parse(&format!("{{{}}}", members.join(",")))), "kept", "{count}");
            for again in [0, count / 2, count - 1] {
                members.push(format!("\"\\u006b{again}\":0"));
                let text = format!("{{{}}}", members.join(","));
                members.pop();
                assert_eq!(
                    verdict(Json::parse(&text)),
                    format!("duplicate at {}", text.rfind(",\"\\").unwrap() + 1),
                    "{count}"
                );
            }
        }
        // Among many, too, the first one that comes again is named.
        let many: String = (0..20).map(|n| format!("\"k{n}\":0,")).collect();
        check(&[(&format!("{{{many}\"k7\":1,\"k3\":1}}"), &format!("duplicate at {}", many.len() + 1))]);
    }

    #[test]
    fn depth() {
        let arrays = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let objects = |depth| format!("{}0{}", "{\"a\":".repeat(depth), "}".repeat(depth));
        for (depth, expected) in [(127, "kept"), (128, "kept"), (129, "deeper than 128 at 128")] {
            assert_eq!(verdict(Json::parse(&arrays(depth))), expected);
        }
        assert_eq!(verdict(Json::parse(&objects(128))), "kept");
        assert_eq!(verdict(Json::parse(&objects(129))), "deeper than 128 at 640");
        assert_eq!(verdict(Json::parse(&format!("[{0},{0}]", arrays(127)))), "kept");
        assert_eq!(verdict(Json::parse_within("1", 0)), "kept");
        assert_eq!(verdict(Json::parse_within("[]", 0)), "deeper than 0 at 0");
        assert_eq!(verdict(Json::parse_within("{\"a\":[[]]}", 2)), "deeper than 2 at 6");
    }

    #[test]
    fn no_depth_reaches_the_stack() {
        let text = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
        assert_eq!(verdict(Json::parse(&text)), "deeper than 128 at 128");
        let json = Json::parse_within(&text, usize::MAX).unwrap();
        assert_eq!(json.canonical().len(), 9_000_000);
        assert!(json.members().is_none());
        assert!(serde_json::to_string(&json).is_ok());
    }

    #[test]
    fn bytes() {
        assert_eq!(verdict(Json::from_bytes("\"é\"".as_bytes())), "kept");
        assert_eq!(verdict(Json::from_bytes(b"\"a\xff\"")), "utf-8 at 2");
        assert_eq!(verdict(Json::from_bytes(b"\"\xc3")), "utf-8 at 1");
        // A surrogate in bytes is not UTF-8 in the first place.
        assert_eq!(verdict(Json::from_bytes(b"\"\xed\xa0\x80\"")), "utf-8 at 1");
    }

    #[test]
    fn errors_tell_place_rule_and_remedy_but_never_the_data() {
        let table = [
            (
                "{\"secret\":secret}",
                "read JSON at byte 10: a value should begin here: an object, array, string, number, true, false or null",
            ),
            ("[\"secret", "read JSON at byte 8: the text ends before the value does; send all of it"),
            ("\u{feff}1", "read JSON at byte 0: a byte order mark; send the text without it"),
            ("[01]", "read JSON at byte 2: a digit after a leading zero; write the number without the zero"),
            ("[1e1234567890123456789]", "read JSON at byte 3: exponent out of range; use 18 digits at most"),
            (
                "{\"secret\":1,\"secret\":2}",
                "read JSON at byte 12: this key stands in the object already, perhaps escaped differently; keep one of the two",
            ),
            (
                "[\"secret\\ud800\"]",
                "read JSON at byte 8: half of a surrogate pair; escape both halves, or send the character itself as UTF-8",
            ),
            (
                "{\"secret\\u0000\":1}",
                "read JSON at byte 8: \\u0000 in an object key; it is kept in values only, so rename the key",
            ),
        ];
        for (text, expected) in table {
            let error = Json::parse(text).unwrap_err();
            assert_eq!(error.to_string(), expected);
            assert_eq!(error.code(), "invalid_json");
            assert!(!format!("{error:?}").contains("secret"));
        }
        let error = Json::parse_within("[[\"secret\"]]", 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "read JSON at byte 1: nested deeper than the limit of 1 arrays and objects; flatten it, or send the inner part as a string"
        );
        assert_eq!(error.code(), "json_too_deep");
        let error = Json::from_bytes(b"\"secret\xff").unwrap_err();
        assert_eq!(error.to_string(), "read JSON at byte 7: not UTF-8; send the text in that encoding");
        assert_eq!(format!("{:?}", Json::parse("\"secret\"").unwrap()), "Json(8 bytes)");
    }

    #[test]
    fn canonical_forms() {
        let table = [
            ("null", "n"),
            ("[true,false]", "a2 t f"),
            ("\"\"", "s0"),
            (r#""\u0041é\n""#, "s4:Aé\n"),
            (r#""\ud83d\ude00""#, "s4:😀"),
            (r#"["\u0000"]"#, "a1 s1:\0"),
            ("[]", "a0"),
            ("{}", "o0"),
            ("[[],[[]],1]", "a3 a0 a1 a0 d3:1e0"),
            (r#"{"b":[1,{"z":0,"y":""}],"a":null}"#, "o2 s1:a n s1:b a2 d3:1e0 o2 s1:y s0 s1:z d3:0e0"),
            // By UTF-8 bytes after unescaping: not as spelled, and not as UTF-16 sorts them.
            (r#"{"\uff5e":2,"\ud83d\ude00":3,"\u0061":1,"":0}"#, "o4 s0 d3:0e0 s1:a d3:1e0 s3:～ d3:2e0 s4:😀 d3:3e0"),
        ];
        for (text, expected) in table {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn canonical_numbers() {
        let table = [
            ("1 1.0 1e0 10e-1 0.1E+1 100e-2 1.000 1e00 1e-0", "1e0"),
            ("0 -0 0.0 -0.00 0e5 0e-5 -0E+999999999999999999", "0e0"),
            ("100 1e2 1e+2 0.1e3 100.0 1000e-1", "1e2"),
            ("-1250 -1.25e3 -1250.00", "-125e1"),
            ("0.05 5e-2 0.050 0.5e-1", "5e-2"),
            ("10.01 1001e-2 10.010", "1001e-2"),
            ("18446744073709551616", "18446744073709551616e0"),
            ("18446744073709551617 18446744073709551617.0", "18446744073709551617e0"),
            ("9007199254740993", "9007199254740993e0"),
            ("0.1", "1e-1"),
            ("0.10000000000000001", "10000000000000001e-17"),
            ("1e400 10e399", "1e400"),
            ("10e999999999999999999", "1e1000000000000000000"),
            ("0.1e-999999999999999999", "1e-1000000000000000000"),
        ];
        for (literals, expected) in table {
            for literal in literals.split(' ') {
                assert_eq!(shown(literal), format!("d{}:{expected}", expected.len()), "{literal}");
            }
        }
    }

    #[test]
    fn what_differs_in_meaning_differs_in_form() {
        let meanings = [
            "null",
            "false",
            "true",
            "0",
            "1",
            "-1",
            "10",
            "0.1",
            "\"\"",
            "\"0\"",
            "\"1\"",
            "\"null\"",
            "\"1e0\"",
            "[]",
            "[null]",
            "[[]]",
            "[[],[]]",
            "[[[]]]",
            "[1,2]",
            "[2,1]",
            "[12]",
            "[\"1\",\"2\"]",
            "[\"12\"]",
            "[\"\",\"12\"]",
            "{}",
            "{\"a\":null}",
            "{\"a\":\"\"}",
            "{\"a\":{}}",
            "{\"a\":[]}",
            "[\"a\",[]]",
            "{\"a\":1,\"b\":2}",
            "{\"a\":2,\"b\":1}",
            "{\"a\":{\"b\":1}}",
            "{\"a\":{},\"b\":1}",
            "[{},{}]",
            "\"\\u00e9\"",
            "\"e\\u0301\"",
            "\"\\u0000\"",
            "\"\\\\u0000\"",
        ];
        let forms: Vec<Vec<u8>> = meanings.iter().map(|text| Json::parse(text).unwrap().canonical()).collect();
        for (a, one) in forms.iter().enumerate() {
            for (b, other) in forms.iter().enumerate() {
                assert_eq!(one.starts_with(other), a == b, "{} and {}", meanings[a], meanings[b]);
            }
        }
    }

    #[test]
    fn the_text_is_kept_byte_for_byte() {
        let text = "{ \"b\":1.50,\n \"a\": 18446744073709551617, \"\\u0061a\" : \"\\/\\u0000\" }";
        let json = Json::parse(&format!(" \r\n{text}\t ")).unwrap();
        assert_eq!(json.as_str(), text);
        assert_eq!(json.to_string(), text);
        assert_eq!(json.len(), text.len());

        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Wire {
            name: String,
            input: Json,
            result: Option<Json>,
        }
        let wire = Wire { name: "w".to_owned(), input: json.clone(), result: None };
        let document = serde_json::to_string(&wire).unwrap();
        assert_eq!(document, format!("{{\"name\":\"w\",\"input\":{text},\"result\":null}}"));
        assert_eq!(serde_json::from_str::<Wire>(&document).unwrap(), wire);
        assert_eq!(Json::from_serialize(&wire).unwrap().as_str(), document);
        let members = Json::parse(&document).unwrap().members().unwrap();
        assert_eq!(members[1], ("input".to_owned(), json));
    }

    #[test]
    fn reading_a_document_checks_the_values_in_it() {
        let table = [
            ("[1, \"\\u0000\"]", "kept"),
            ("[{\"a\":1,\"a\":2}]", "at byte 7: this key"),
            ("[\"\\ud800\"]", "at byte 1: half of"),
            ("[{\"\\u0000\":1}]", "at byte 2: \\u0000 in"),
            ("[1e9999999999999999999]", "at byte 2: exponent"),
        ];
        for (text, expected) in table {
            match serde_json::from_str::<Vec<Json>>(text) {
                Ok(_) => assert_eq!(expected, "kept"),
                Err(error) => assert!(error.to_string().contains(expected), "{text} gives {error}"),
            }
        }
        let deep = |depth| format!("[{}{}]", "[".repeat(depth), "]".repeat(depth));
        assert!(serde_json::from_str::<Vec<Json>>(&deep(128)).is_ok());
        assert!(serde_json::from_str::<Vec<Json>>(&deep(129)).is_err());
    }

    #[test]
    fn members_come_in_the_order_written() {
        let members = |text: &str| {
            let members = Json::parse(text).unwrap().members()?;
            Some(members.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(members(r#"{"b": {"x":[ 1 ]} , "\u0061":"}" ,"":1e2}"#).unwrap(), r#"b={"x":[ 1 ]} a="}" =1e2"#);
        assert_eq!(members("{ }").unwrap(), "");
        for text in ["null", "1", "\"{\"", "[{\"a\":1}]"] {
            assert_eq!(members(text), None, "{text}");
        }
    }

    #[test]
    fn rust_values() {
        use std::collections::BTreeMap;
        assert_eq!(Json::from_serialize("a\u{0}").unwrap().as_str(), r#""a\u0000""#);
        assert_eq!(Json::from_serialize(&u128::MAX).unwrap().to::<u128>().unwrap(), u128::MAX);
        assert_eq!(verdict(Json::from_serialize(&BTreeMap::from([("a\0", 1)]))), "nul at 3");
        assert_eq!(verdict(Json::from_serialize(&BTreeMap::from([((1, 2), 3)]))), "unserializable");
        assert!(Json::null().is_null());
        assert!(Json::from_serialize(&f64::NAN).unwrap().is_null());
        assert!(!Json::from_serialize("null").unwrap().is_null());
        assert!(Json::trusted("null").is_null());
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a stored text of 3 bytes is not JSON")]
    fn a_debug_build_does_look_at_stored_texts() {
        Json::trusted("[1}");
    }

    #[test]
    fn a_text_damaged_in_the_store_is_noticed_without_panic() {
        for text in ["", "{\"a\":1", "\"\\u12", "{\"a\"}", "n", "1e", "[1]]"] {
            let damaged = Json(Arc::from(text));
            assert!(serde_json::to_string(&damaged).is_err(), "{text}");
            assert!(damaged.to::<serde::de::IgnoredAny>().is_err(), "{text}");
            assert!(damaged.members().is_none(), "{text}");
            assert_eq!(damaged.canonical()[..1], *b"!", "{text}");
            assert_eq!(damaged.canonical().len(), 9 + text.len(), "{text}");
        }
        // What a newer rule refuses is served as it was stored.
        let older = Json(Arc::from("{\"a\":1,\"a\":2}"));
        assert_eq!(serde_json::to_string(&older).unwrap(), older.as_str());
        assert_eq!(older.members().unwrap().len(), 2);
    }
}
