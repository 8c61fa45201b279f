//! Limits: how large what comes from outside may be, and the one error that says so.

use std::fmt;

/// Every bound that input is checked against. All are inclusive and can be configured per engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Longest workflow id, in bytes.
    pub id_bytes_max: usize,
    /// Longest definition name or step name, in bytes.
    pub name_bytes_max: usize,
    /// Longest scratchpad key, in bytes.
    pub key_bytes_max: usize,
    /// Largest single JSON value (input, scratchpad value, result), in bytes.
    pub value_bytes_max: usize,
    /// Largest sum of keys and values that one step may write, in bytes.
    pub writes_bytes_max: usize,
    /// Deepest nesting of arrays and objects in one JSON value.
    pub json_depth_max: usize,
    /// Longest failure reason, in bytes; longer ones are cut at a character boundary, not refused.
    pub reason_bytes_max: usize,
    /// Largest progress value of a heartbeat, in bytes.
    pub progress_bytes_max: usize,
    /// Most tags of one workflow.
    pub tags_max: usize,
    /// Most workflows in one bulk start.
    pub bulk_max: usize,
    /// Most signals that one wait may name.
    pub wait_signals_max: usize,
    /// How far ahead a durable sleep may reach, in milliseconds.
    pub sleep_ms_max: i64,
    /// How often one visit of a step may be handed out before the workflow fails with `deliveries_exhausted`.
    pub deliveries_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            id_bytes_max: 128,
            name_bytes_max: 128,
            key_bytes_max: 256,
            value_bytes_max: 1 << 20,
            writes_bytes_max: 4 << 20,
            json_depth_max: 128,
            reason_bytes_max: 4 << 10,
            progress_bytes_max: 4 << 10,
            tags_max: 32,
            bulk_max: 10_000,
            wait_signals_max: 32,
            // Ten years of 365.25 days: far enough for any reminder, near enough that a unit mistake is caught.
            sleep_ms_max: 10 * 31_557_600_000,
            deliveries_max: 20,
        }
    }
}

/// Input that was refused before anything was written.
///
/// It names the field, the limit and the remedy, and never holds the refused content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// Stable code: `value_too_large`, `invalid_id`, `invalid_json`, ..
    pub code: &'static str,
    /// Which field was refused, as the caller spelled it (`id`, `writes.user`, `retry.factor_percent`).
    pub field: String,
    /// The size that was found, where the refusal is about a size.
    pub size: Option<u64>,
    /// The limit that was passed, where there is one.
    pub limit: Option<u64>,
    /// What is wrong and what to do about it.
    pub problem: String,
}

impl Invalid {
    /// A refusal without a size.
    pub fn new(code: &'static str, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { code, field: field.into(), size: None, limit: None, problem: problem.into() }
    }

    /// A refusal because `size` is over `limit`.
    pub fn over(code: &'static str, field: impl Into<String>, size: usize, limit: usize, remedy: &str) -> Self {
        Self {
            code,
            field: field.into(),
            size: Some(size as u64),
            limit: Some(limit as u64),
            problem: format!("is {size} where at most {limit} is allowed; {remedy}"),
        }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.problem)
    }
}

impl std::error::Error for Invalid {}

/// Cuts a failure reason to `limit` bytes at a character boundary.
pub fn cut(reason: &str, limit: usize) -> &str {
    if reason.len() <= limit {
        return reason;
    }
    let mut end = limit;
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn a_reason_is_cut_between_characters() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "abc");
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("é", 1), "");
        assert_eq!(cut("", 0), "");
    }
}
