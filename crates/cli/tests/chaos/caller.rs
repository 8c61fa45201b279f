//! Caller: a client as it should be.
//!
//! Each request has an id. After an error or without an answer the same request goes out again under the same id, to
//! whatever node, until there is a definite answer: it was done, or it is certainly refused for good.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::Value;

use crate::chance::Chance;
use crate::common::STUCK;
use crate::ledger::{Asked, Ledger, Standing, count};
use crate::nodes::Nodes;

/// A client that waits longer than this asks another node.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

pub struct Caller {
    /// Makes ids that nobody else uses.
    pub name: String,
    pub http: reqwest::Client,
    pub nodes: Arc<Nodes>,
    pub ledger: Arc<Ledger>,
    pub chance: Chance,
    /// What it is at.
    pub job: &'static str,
    /// How many ids it has made.
    made: u64,
    /// How many requests it has sent to a node.
    pub sent: usize,
}

/// What one attempt came to.
pub enum Attempt {
    Definite(Told),
    /// Nothing was written.
    NotNow,
    /// It may have been written.
    Doubt,
}

/// A definite answer.
#[derive(Debug)]
pub struct Told {
    pub status: u16,
    pub replay: bool,
    pub body: Value,
}

impl Told {
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The code of an error.
    pub fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or_default()
    }
}

impl Caller {
    pub fn new(name: String, nodes: Arc<Nodes>, ledger: Arc<Ledger>, chance: Chance) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().expect("a client without proxies");
        Self { name, http, nodes, ledger, chance, job: "none", made: 0, sent: 0 }
    }

    pub fn fresh_id(&mut self) -> String {
        self.made += 1;
        format!("{}-{}-{}", self.job, self.name, self.made)
    }

    /// A node that runs, as far as the caller knows.
    pub fn somewhere(&mut self) -> Option<String> {
        let n = usize::try_from(self.chance.below(self.nodes.count() as u64)).expect("nodes are few");
        self.nodes.url(n)
    }

    pub async fn attempt(&mut self, method: Method, path: &str, body: Option<&Value>) -> Attempt {
        let Some(url) = self.somewhere() else { return Attempt::NotNow };
        self.sent += 1;
        let mut request = self.http.request(method, format!("{url}{path}"));
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = match request.send().await {
            Ok(response) => response,
            // Nobody took the request.
            Err(error) if error.is_connect() => return Attempt::NotNow,
            Err(_) => return Attempt::Doubt,
        };
        let status = response.status().as_u16();
        let replay = response.headers().get("idempotent-replay").is_some();
        let Ok(body) = response.json::<Value>().await else { return Attempt::Doubt };
        judge(Told { status, replay, body })
    }

    fn note(&self, attempt: &Attempt) {
        let tally = &self.ledger.tally;
        count(match attempt {
            Attempt::Definite(_) => &tally.answers,
            Attempt::NotNow => &tally.not_now,
            Attempt::Doubt => &tally.unknown,
        });
    }

    /// Asks until there is a definite answer, and says whether an attempt before it may have been written. `None` when
    /// there is none for long, which is a fault.
    pub async fn ask(&mut self, method: Method, path: &str, body: Option<&Value>) -> Option<(Told, bool)> {
        let (begin, before, mut doubt) = (Instant::now(), self.sent, false);
        while begin.elapsed() < 2 * STUCK {
            let attempt = self.attempt(method.clone(), path, body).await;
            self.note(&attempt);
            match attempt {
                Attempt::Definite(told) => {
                    self.ledger.tally.sent_most.fetch_max(self.sent - before, Ordering::Relaxed);
                    return Some((told, doubt));
                }
                Attempt::NotNow => {}
                Attempt::Doubt => doubt = true,
            }
            tokio::time::sleep(PAUSE).await;
        }
        None
    }

    /// Starts a workflow that nobody has asked for before. Whether it was accepted.
    pub async fn start(&mut self, id: &str, asked: &Asked) -> bool {
        self.start_with(id, asked, asked.body(id)).await
    }

    pub async fn start_with(&mut self, id: &str, asked: &Asked, body: Value) -> bool {
        self.ledger.sent(id, asked);
        let Some((told, doubt)) = self.ask(Method::POST, "/v1/workflows", Some(&body)).await else { return false };
        self.settle(id, &told, doubt)
    }

    /// Writes the definite answer to a first start down. Whether it was accepted.
    pub fn settle(&self, id: &str, told: &Told, doubt: bool) -> bool {
        if !told.is_success() {
            self.ledger.stands(id, Standing::Refused(told.code().to_owned()));
            return false;
        }
        self.ledger.stands(id, Standing::Accepted);
        if told.replay || told.body["replay"] == true {
            count(&self.ledger.tally.replays);
            if !doubt {
                let what = "every attempt before was refused or not sent, and yet it was there";
                self.ledger.contradiction(format!("{id}: {what}"));
            }
        }
        true
    }

    /// Sends a start once. `true` when it is settled, `false` when it may have been written.
    pub async fn start_once(&mut self, id: &str, asked: &Asked) -> bool {
        self.ledger.sent(id, asked);
        let body = asked.body(id);
        let attempt = self.attempt(Method::POST, "/v1/workflows", Some(&body)).await;
        self.note(&attempt);
        match attempt {
            Attempt::Definite(told) => drop(self.settle(id, &told, false)),
            Attempt::NotNow => self.ledger.stands(id, Standing::Refused("not_now".to_owned())),
            Attempt::Doubt => return false,
        }
        true
    }
}

/// What an answer says of the request, by its class.
pub fn judge(told: Told) -> Attempt {
    match told.body["class"].as_str() {
        _ if told.is_success() => Attempt::Definite(told),
        Some("refused_final" | "conflict") => Attempt::Definite(told),
        Some("refused_retryable") => Attempt::NotNow,
        _ => Attempt::Doubt,
    }
}
