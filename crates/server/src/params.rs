//! Params: what stands in the address of a request, checked.

use std::ops::RangeInclusive;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Query, RawPathParams};
use axum::http::request::Parts;
use steadfast::Invalid;
use steadfast::core::text::{Key, Namespace, WorkflowId, WorkflowKey};

use crate::problem::Problem;
use crate::server::App;

/// The workflow that a path names, and its variable where it names one.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) key: WorkflowKey,
    pub(crate) variable: Option<Key>,
}

impl Target {
    /// The workflow of an id that was checked.
    pub(crate) fn workflow(id: WorkflowId) -> Self {
        Self { key: WorkflowKey { namespace: Namespace::default_namespace(), id }, variable: None }
    }

    pub(crate) fn id(&self) -> &str {
        self.key.id.as_str()
    }
}

impl FromRequestParts<Arc<App>> for Target {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let limits = app.engine.limits();
        let not_text =
            |_| Problem::from(Invalid::new("invalid_id", "path", "is not UTF-8 when its escapes are decoded"));
        let params = RawPathParams::from_request_parts(parts, app).await.map_err(not_text)?;
        let find = |wanted: &str| params.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
        let id = WorkflowId::parse_as("id", find("id").unwrap_or_default(), limits)?;
        let variable = find("key").map(|key| Key::parse_as("key", key, limits)).transpose()?;
        Ok(Self { variable, ..Self::workflow(id) })
    }
}

/// The parameters behind the question mark. A route takes those it knows and then asks for the [`end`](Params::end).
#[derive(Debug)]
pub(crate) struct Params(Vec<(String, String)>);

impl FromRequestParts<Arc<App>> for Params {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        match Query::from_request_parts(parts, app).await {
            Ok(Query(pairs)) => Ok(Self(pairs)),
            Err(_) => Err(Problem::request("query", "must be name=value pairs in UTF-8")),
        }
    }
}

impl Params {
    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(param, _)| param == name)?;
        Some(self.0.remove(at).1)
    }

    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<u64>, default: u64) -> Result<u64, Problem> {
        let Some(text) = self.text(name) else { return Ok(default) };
        let (min, max) = (*range.start(), *range.end());
        let wrong = || Invalid::new("invalid_request", name, format!("must be a whole number from {min} to {max}"));
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong().into());
        }
        match text.parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            Ok(number) if number > max => Err(Invalid { size: Some(number), limit: Some(max), ..wrong() }.into()),
            Ok(number) => Err(Invalid { size: Some(number), ..wrong() }.into()),
            Err(_) => Err(Invalid { limit: Some(max), ..wrong() }.into()),
        }
    }

    /// Refuses what is left: an unknown parameter would be a filter that does not filter.
    pub(crate) fn end(self) -> Result<(), Problem> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                let name = steadfast::core::limits::cut(name, 128);
                Err(Problem::request(name, "is no parameter of this route, or stands there twice"))
            }
        }
    }
}
