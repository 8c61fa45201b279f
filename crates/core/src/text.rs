//! Text: the short strings that name things, each checked once, where it enters.
//!
//! All are non-empty, printable and bounded; none holds a control character, so none can break a log line,
//! a terminal or an index key. They are cheap to clone, because a workflow's id travels with every event.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limits::{Invalid, Limits};

/// True for characters that must not stand in a name: controls, and the invisible ones that change how a line
/// reads (line and paragraph separators, directional overrides, a byte order mark).
fn unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn check(text: &str, code: &'static str, field: &str, limit: usize) -> Result<(), Invalid> {
    if text.is_empty() {
        return Err(Invalid {
            limit: Some(limit as u64),
            size: Some(0),
            ..Invalid::new(code, field, format!("is empty; give 1 to {limit} bytes of printable text"))
        });
    }
    if text.len() > limit {
        return Err(Invalid::over(code, field, text.len(), limit, "shorten it (the limit counts UTF-8 bytes)"));
    }
    if matches!(text, "." | "..") && matches!(code, "invalid_id" | "invalid_key") {
        return Err(Invalid::new(code, field, "cannot stand in a URL, where it means a folder; choose another"));
    }
    if let Some((at, _)) = text.char_indices().find(|(_, c)| unprintable(*c)) {
        return Err(Invalid::new(
            code,
            field,
            format!("has an unprintable character at byte {at}; use printable text only"),
        ));
    }
    Ok(())
}

macro_rules! text {
    ($(#[$doc:meta])* $name:ident, $code:literal, $limit:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text`; the error names `field`.
            ///
            /// # Errors
            #[doc = concat!("[`Invalid`] with code `", $code, "` when it is empty, too long or not printable.")]
            pub fn parse_as(field: &str, text: &str, limits: &Limits) -> Result<Self, Invalid> {
                check(text, $code, field, limits.$limit)?;
                Ok(Self(text.into()))
            }

            /// Takes text that was checked when it was stored.
            pub fn trusted(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            /// Reads text that was checked when it was stored; input from outside goes through `parse_as`.
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(Self(Arc::<str>::deserialize(deserializer)?))
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text! {
    /// The tenant that an id lives in; `default` until keys exist. It opens every primary key.
    Namespace, "invalid_namespace", name_bytes_max
}
text! {
    /// The caller's name for one durable run.
    WorkflowId, "invalid_id", id_bytes_max
}
text! {
    /// The name under which a definition (the code of a workflow) is registered.
    Name, "invalid_name", name_bytes_max
}
text! {
    /// The name of a step of a definition.
    Step, "invalid_step", name_bytes_max
}
text! {
    /// The name of a scratchpad variable.
    Key, "invalid_key", key_bytes_max
}
text! {
    /// A short stable word for a kind of failure, chosen by a handler or by us (`lease_lost`).
    FailureCode, "invalid_code", name_bytes_max
}
text! {
    /// The name of a signal that a workflow waits for.
    SignalName, "invalid_signal", name_bytes_max
}
text! {
    /// The caller's name for one signal to one workflow.
    SignalId, "invalid_id", id_bytes_max
}
text! {
    /// A label of a workflow that lists can filter by.
    Tag, "invalid_tag", name_bytes_max
}

impl Step {
    /// The step every workflow begins with.
    pub fn start() -> Self {
        Self::trusted("start")
    }
}

impl Namespace {
    /// The namespace in use until keys exist.
    pub fn default_namespace() -> Self {
        Self::trusted("default")
    }
}

/// What names a workflow in a store: its namespace and its id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkflowKey {
    /// The tenant.
    pub namespace: Namespace,
    /// The id within the tenant.
    pub id: WorkflowId,
}

impl fmt::Display for WorkflowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_holds_at_minus_one_zero_and_plus_one() {
        let limits = Limits::default();
        let text = |n: usize| "x".repeat(n);
        assert!(WorkflowId::parse_as("id", &text(127), &limits).is_ok());
        assert!(WorkflowId::parse_as("id", &text(128), &limits).is_ok());
        let refused = WorkflowId::parse_as("id", &text(129), &limits).unwrap_err();
        assert_eq!((refused.code, refused.size, refused.limit), ("invalid_id", Some(129), Some(128)));
        assert!(Key::parse_as("writes", &text(256), &limits).is_ok());
        assert_eq!(Key::parse_as("writes", &text(257), &limits).unwrap_err().limit, Some(256));
        assert_eq!(Step::parse_as("step", "", &limits).unwrap_err().code, "invalid_step");
    }

    #[test]
    fn the_limit_counts_bytes_and_refuses_what_cannot_be_seen() {
        let limits = Limits::default();
        assert!(Name::parse_as("name", &"é".repeat(64), &limits).is_ok());
        assert!(Name::parse_as("name", &"é".repeat(65), &limits).is_err());
        for bad in ["a\u{0}b", "a\nb", "a\u{7f}", "\u{85}", "\u{2028}", "\u{202e}abc", "\u{feff}x"] {
            assert_eq!(Name::parse_as("name", bad, &limits).unwrap_err().code, "invalid_name", "{bad:?}");
        }
        assert!(Name::parse_as("name", "日本語 ok", &limits).is_ok());
        // A URL cannot carry these as a part of its path, however they are escaped.
        for bad in [".", ".."] {
            assert_eq!(WorkflowId::parse_as("id", bad, &limits).unwrap_err().code, "invalid_id");
            assert_eq!(Key::parse_as("writes", bad, &limits).unwrap_err().code, "invalid_key");
        }
        assert!(WorkflowId::parse_as("id", "...", &limits).is_ok());
    }
}
