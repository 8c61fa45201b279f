//! Fingerprint: the digest of what was asked, so that a repeated id is told apart from a reused one.
//!
//! A fingerprint is the version of its rules (one byte) and an HMAC-SHA-256 under a key of the store over the
//! canonical form of the request as it was sent: the operation, namespace, definition name, input, further
//! writes and options. Left out are the id itself, request ids, time-outs and every default filled in later,
//! so that a new default never turns a retry into a conflict. The key keeps a fingerprint from being an oracle
//! for guessable content after that content has been redacted.
//!
//! Each part is length-prefixed, so that no two requests share an encoding; JSON values go in by their
//! canonical form ([`crate::json`]): key order, spacing and the spelling of numbers and escapes do not matter,
//! the exact decimal value does.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::event::Writes;
use crate::json::Json;
use crate::options::StartOptions;
use crate::text::{Name, Namespace, SignalName, WorkflowKey};

/// The version of the rules above.
pub const VERSION: u8 = 1;

/// Version and digest of one request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(pub [u8; 33]);

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}:", self.0[0])?;
        self.0[1..9].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Fingerprint {
    /// The fingerprint of a start.
    pub fn of_start(
        key: &FingerprintKey,
        namespace: &Namespace,
        name: &Name,
        input: &Json,
        writes: &Writes,
        options: &StartOptions,
    ) -> Self {
        let mut hmac = Hmac::new(key);
        hmac.text("start");
        hmac.text(namespace.as_str());
        hmac.text(name.as_str());
        hmac.json(input);
        // In key order: the order in which initial variables are listed means nothing.
        let mut variables: Vec<_> =
            writes.iter().filter_map(|w| w.value.as_ref().map(|value| (&w.key, value))).collect();
        variables.sort_by_key(|(key, _)| *key);
        hmac.count(variables.len());
        for (key, value) in variables {
            hmac.text(key.as_str());
            hmac.json(value);
        }
        let options = serde_json::to_string(options).expect("options hold integers and strings");
        hmac.json(&Json::trusted(options));
        hmac.finish()
    }
}

impl Fingerprint {
    /// The fingerprint of a signal.
    pub fn of_signal(key: &FingerprintKey, workflow: &WorkflowKey, name: &SignalName, payload: &Json) -> Self {
        let mut hmac = Hmac::new(key);
        hmac.text("signal");
        hmac.text(workflow.namespace.as_str());
        hmac.text(workflow.id.as_str());
        hmac.text(name.as_str());
        hmac.json(payload);
        hmac.finish()
    }
}

/// The store's secret that fingerprints are keyed with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FingerprintKey(pub [u8; 32]);

impl fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintKey(..)")
    }
}

/// HMAC-SHA-256 (RFC 2104) fed piece by piece; the key is shorter than a block.
struct Hmac {
    inner: Sha256,
    outer: Sha256,
}

impl Hmac {
    fn new(key: &FingerprintKey) -> Self {
        let mut block = [0u8; 64];
        block[..32].copy_from_slice(&key.0);
        let mut inner = Sha256::new();
        let mut outer = Sha256::new();
        inner.update(block.map(|byte| byte ^ 0x36));
        outer.update(block.map(|byte| byte ^ 0x5c));
        Self { inner, outer }
    }

    fn count(&mut self, n: usize) {
        self.inner.update((n as u64).to_be_bytes());
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.inner.update(text.as_bytes());
    }

    fn json(&mut self, value: &Json) {
        value.feed_canonical(&mut |bytes: &[u8]| self.inner.update(bytes));
    }

    fn finish(mut self) -> Fingerprint {
        self.outer.update(self.inner.finalize());
        let mut bytes = [VERSION; 33];
        bytes[1..].copy_from_slice(&self.outer.finalize());
        Fingerprint(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Key;

    fn of(name: &str, input: &str, writes: &[(&str, &str)], options: &StartOptions) -> Fingerprint {
        let writes = writes.iter().map(|(k, v)| (Key::trusted(*k), Some(Json::parse(v).unwrap()))).collect();
        let namespace = Namespace::default_namespace();
        Fingerprint::of_start(
            &FingerprintKey([7; 32]),
            &namespace,
            &Name::trusted(name),
            &Json::parse(input).unwrap(),
            &writes,
            options,
        )
    }

    #[test]
    fn spelling_does_not_matter_meaning_does() {
        let none = StartOptions::default();
        let base = of("n", r#"{"a":1,"b":"A"}"#, &[], &none);
        for same in [r#"{"b":"A","a":1}"#, r#" { "a" : 1.0, "b":"\u0041" } "#, r#"{"a":10e-1,"b":"A"}"#] {
            assert_eq!(of("n", same, &[], &none), base, "{same}");
        }
        let high = StartOptions { priority: Some(1), ..StartOptions::default() };
        for other in [
            of("n", r#"{"a":1.0000000000000000001,"b":"A"}"#, &[], &none),
            of("n", r#"{"a":1,"b":"A","c":null}"#, &[], &none),
            of("m", r#"{"a":1,"b":"A"}"#, &[], &none),
            of("n", r#"{"a":1,"b":"A"}"#, &[("k", "1")], &none),
            of("n", r#"{"a":1,"b":"A"}"#, &[], &high),
        ] {
            assert_ne!(other, base);
        }
        assert_ne!(of("n", "18446744073709551616", &[], &none), of("n", "18446744073709551617", &[], &none));
    }

    #[test]
    fn the_order_of_initial_variables_does_not_matter() {
        let none = StartOptions::default();
        assert_eq!(of("n", "1", &[("a", "1"), ("b", "2")], &none), of("n", "1", &[("b", "2"), ("a", "1")], &none));
        assert_ne!(of("n", "1", &[("a", "1"), ("b", "2")], &none), of("n", "1", &[("a", "2"), ("b", "1")], &none));
    }

    /// RFC 4231, test case 2 has a short key; ours is fixed at 32 bytes, so the value was computed with Python's
    /// `hmac.new(bytes([7]*32), b"", "sha256")`.
    #[test]
    fn the_mac_is_hmac_sha_256() {
        let empty = Hmac::new(&FingerprintKey([7; 32])).finish();
        assert_eq!(format!("{empty:?}"), "v1:9dac6a74401b46ed");
    }
}
