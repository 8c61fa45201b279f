//! Options: what a caller may ask of one workflow, and what it runs by.

use serde::{Deserialize, Serialize};

use crate::limits::{Invalid, Limits};
use crate::retry::RetryPolicy;
use crate::text::Tag;

/// How long an attempt may take, by default: ten minutes.
pub const STEP_TIMEOUT_MS: u64 = 600_000;
/// The longest step timeout: 30 days.
const STEP_TIMEOUT_MS_MAX: u64 = 30 * 86_400_000;

/// Options as a caller sends them: only what was named. These, not the defaults filled in later, enter the fingerprint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StartOptions {
    /// The retry policy; the definition's, else [`RetryPolicy::default`], when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetryPolicy>,
    /// How long one attempt may take, in milliseconds; the definition's, else [`STEP_TIMEOUT_MS`], when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_timeout_ms: Option<u64>,
    /// -100 to 100, higher first; 0 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Labels to list by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Tag>,
}

impl StartOptions {
    /// Refuses options that mean nothing.
    ///
    /// # Errors
    /// [`Invalid`] with code `invalid_options` or `invalid_tag`, naming the field.
    pub fn check(&self, limits: &Limits) -> Result<(), Invalid> {
        if let Some(retry) = &self.retry {
            retry.check()?;
        }
        if let Some(ms) = self.step_timeout_ms
            && !(1..=STEP_TIMEOUT_MS_MAX).contains(&ms)
        {
            return Err(Invalid::new("invalid_options", "step_timeout_ms", "is out of range; give 1 ms to 30 days"));
        }
        if let Some(priority) = self.priority
            && !(-100..=100).contains(&priority)
        {
            return Err(Invalid::new("invalid_options", "priority", "is out of range; give -100 to 100, higher first"));
        }
        if self.tags.len() > limits.tags_max {
            return Err(Invalid::over("invalid_options", "tags", self.tags.len(), limits.tags_max, "give fewer tags"));
        }
        for tag in &self.tags {
            Tag::parse_as("tags", tag.as_str(), limits)?;
        }
        Ok(())
    }

    /// What the workflow runs by: what was asked, else what the definition says, else the defaults.
    pub fn resolve(&self, definition: &Options) -> Options {
        Options {
            retry: self.retry.clone().unwrap_or_else(|| definition.retry.clone()),
            step_timeout_ms: self.step_timeout_ms.unwrap_or(definition.step_timeout_ms),
            priority: self.priority.unwrap_or(definition.priority),
            tags: if self.tags.is_empty() { definition.tags.clone() } else { self.tags.clone() },
        }
    }
}

/// The options a workflow runs by, complete; fixed when it is created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// The retry policy.
    #[serde(skip_serializing_if = "is_default")]
    pub retry: RetryPolicy,
    /// How long one attempt may take, in milliseconds.
    #[serde(skip_serializing_if = "is_standard_timeout")]
    pub step_timeout_ms: u64,
    /// Higher first.
    #[serde(skip_serializing_if = "is_default")]
    pub priority: i32,
    /// Labels to list by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Tag>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands the field by reference")]
fn is_standard_timeout(ms: &u64) -> bool {
    *ms == STEP_TIMEOUT_MS
}

impl Default for Options {
    fn default() -> Self {
        Self { retry: RetryPolicy::default(), step_timeout_ms: STEP_TIMEOUT_MS, priority: 0, tags: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_from_the_default_is_written() {
        assert_eq!(serde_json::to_string(&Options::default()).unwrap(), "{}");
        let options = Options { priority: 7, ..Options::default() };
        let text = serde_json::to_string(&options).unwrap();
        assert_eq!(text, r#"{"priority":7}"#);
        assert_eq!(serde_json::from_str::<Options>(&text).unwrap(), options);
    }

    #[test]
    fn a_caller_wins_over_the_definition_and_the_definition_over_the_default() {
        let definition = Options { step_timeout_ms: 5, priority: 1, ..Options::default() };
        let asked = StartOptions { priority: Some(9), ..StartOptions::default() };
        let options = asked.resolve(&definition);
        assert_eq!((options.priority, options.step_timeout_ms, options.retry.attempts_max), (9, 5, 5));
    }

    #[test]
    fn bounds_are_inclusive() {
        let limits = Limits::default();
        let with =
            |priority| StartOptions { priority: Some(priority), ..StartOptions::default() }.check(&limits).is_ok();
        assert_eq!([-101, -100, 100, 101].map(with), [false, true, true, false]);
        let timeout = |ms| StartOptions { step_timeout_ms: Some(ms), ..StartOptions::default() }.check(&limits).is_ok();
        assert_eq!([0, 1, STEP_TIMEOUT_MS_MAX, STEP_TIMEOUT_MS_MAX + 1].map(timeout), [false, true, true, false]);
    }
}
