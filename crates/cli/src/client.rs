//! Client: a server, spoken to over HTTP.

use std::time::Duration;

use clap::Args;
use reqwest::{Method, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::exit::{Exit, chain};

/// How often a call that may be repeated is sent.
const TRIES: u32 = 4;

/// What every verb that talks to a server takes.
#[derive(Debug, Clone, Args)]
pub struct Client {
    /// The server to talk to.
    #[arg(long, value_name = "URL", env = "STEADFAST_URL", default_value = "http://127.0.0.1:7420")]
    server: Url,
    /// One JSON value on standard output.
    #[arg(long)]
    pub json: bool,
}

/// An answer: its status and its body as it came.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: StatusCode,
    /// The body, byte for byte.
    pub text: String,
}

impl Answer {
    /// The body as what it should be.
    ///
    /// # Errors
    /// When it is not.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Exit> {
        read(&self.text)
    }
}

/// Reads what a server sent.
///
/// # Errors
/// When it is something else.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, Exit> {
    serde_json::from_str(text).map_err(|error| {
        Exit::other(format!("the server's answer is not what it should be ({error}); is it a Steadfast server?"))
    })
}

impl Client {
    /// Calls `path`, given segment by segment so that ids may hold any character.
    ///
    /// # Errors
    /// [`Exit`] for a server that cannot be reached or that refuses.
    pub async fn call(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
    ) -> Result<Answer, Exit> {
        let mut url = self.server.clone();
        {
            let mut segments = url.path_segments_mut().map_err(|()| {
                Exit::refused("invalid_url", "--server is not a URL with a host; give http://HOST:PORT")
            })?;
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query.iter().map(|(key, value)| (*key, value.as_str())));
        }
        // A long poll answers by itself; what takes longer than that is a server that is gone.
        let client = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .timeout(Duration::from_secs(90))
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| Exit::other(chain(&error)))?;
        let mut request = client.request(method, url);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let unreachable = |error: reqwest::Error| {
            let message = format!(
                "cannot reach {}: {}; start one with `steadfast dev`, or name it with --server",
                self.shown(),
                chain(&error.without_url())
            );
            Exit::new(7, "unreachable", message)
        };
        let response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        let text = response.text().await.map_err(unreachable)?;
        let answer = Answer { status, text };
        if status.is_success() { Ok(answer) } else { Err(Exit::of_problem(status.as_u16(), answer.read()?)) }
    }

    /// The server's URL without what may be secret in it.
    fn shown(&self) -> Url {
        let mut url = self.server.clone();
        // A URL that can have none has none.
        let _ = (url.set_username(""), url.set_password(None));
        url.set_query(None);
        url
    }

    /// Calls again while the answer is that it may be tried again. Only for calls that may be repeated.
    ///
    /// # Errors
    /// As [`Client::call`], after the last try.
    pub async fn call_repeatable(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
    ) -> Result<Answer, Exit> {
        let mut pause = Duration::from_millis(100);
        for _ in 1..TRIES {
            match self.call(method.clone(), path, query, body.clone()).await {
                Err(exit) if exit.code == 7 || exit.code == 8 => {
                    tokio::time::sleep(pause).await;
                    pause *= 3;
                }
                settled => return settled,
            }
        }
        self.call(method, path, query, body).await
    }

    /// Looks at `path`.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub async fn get(&self, path: &[&str], query: &[(&str, String)]) -> Result<Answer, Exit> {
        self.call(Method::GET, path, query, None).await
    }

    /// All pages of a list, each item as it came.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub async fn pages(
        &self,
        path: &[&str],
        member: &str,
        mut query: Vec<(&str, String)>,
        cursor: &'static str,
        limit: usize,
    ) -> Result<(Vec<Box<RawValue>>, Value), Exit> {
        let mut items = Vec::new();
        loop {
            let page = limit.saturating_sub(items.len()).min(500);
            query.retain(|(key, _)| *key != "limit");
            query.push(("limit", page.max(1).to_string()));
            let answer = self.get(path, &query).await?;
            let mut members: std::collections::BTreeMap<String, Box<RawValue>> = answer.read()?;
            let listed = members.remove(member).ok_or_else(|| Exit::other("the server's answer is not a page"))?;
            let listed: Vec<Box<RawValue>> = read(listed.get())?;
            items.extend(listed);
            let next: Value =
                members.remove("next").and_then(|next| serde_json::from_str(next.get()).ok()).unwrap_or(Value::Null);
            let next_text = match &next {
                Value::Null => return Ok((items, Value::Null)),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            if items.len() >= limit {
                return Ok((items, next));
            }
            query.retain(|(key, _)| *key != cursor);
            query.push((cursor, next_text));
        }
    }
}
