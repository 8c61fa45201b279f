//! Place: which database, and how we speak to it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;

use crate::contract::StoreError;

/// How long a connection may take to be made.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// The longest name of a schema: the longest of our own names fits behind it in what PostgreSQL keeps of a name.
const SCHEMA_BYTES_MAX: usize = 40;
/// Committers of one process: two use a second core, more get in each other's way.
const COMMITTERS: usize = 2;
/// Connections for looks.
const LOOKS: usize = 4;

/// Whether statements are prepared once a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prepared {
    /// When the server sees this very connection, and not that of a pooler.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// A store's place in a PostgreSQL database, read from a URL.
///
/// Beside what PostgreSQL's own URLs hold (several hosts, `connect_timeout`, `application_name`, ..) it may say
/// `schema=NAME` (`steadfast` unless told), `prepared=auto|on|off`, `committers=N` and `looks=N`.
#[derive(Clone)]
pub struct Place {
    pub(super) config: Config,
    pub(super) schema: String,
    pub(super) prepared: Prepared,
    pub(super) committers: usize,
    pub(super) looks: usize,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the password.
        write!(f, "{self}")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("postgres://")?;
        for (n, (host, port)) in self.hosts().into_iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            write!(f, "{comma}{host}:{port}")?;
        }
        write!(f, "/{}?schema={}", self.config.get_dbname().unwrap_or_default(), self.schema)
    }
}

/// True for a URL that names a PostgreSQL database.
pub fn is_postgres(url: &str) -> bool {
    url.starts_with("postgres://") || url.starts_with("postgresql://")
}

impl Place {
    /// Reads a URL.
    ///
    /// # Errors
    /// [`StoreError::Place`] naming what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        let bad = |problem: String| StoreError::Place { problem };
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut place = Self {
            config: Config::new(),
            schema: "steadfast".to_owned(),
            prepared: Prepared::Auto,
            committers: COMMITTERS,
            looks: LOOKS,
        };
        let mut theirs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "schema" => place.schema = schema(value)?,
                "prepared" => {
                    place.prepared = match value {
                        "auto" => Prepared::Auto,
                        "on" => Prepared::On,
                        "off" => Prepared::Off,
                        _ => return Err(bad(format!("prepared is {value}; give auto, on or off"))),
                    };
                }
                "committers" => place.committers = between(name, value, 16)?,
                "looks" => place.looks = between(name, value, 64)?,
                _ => theirs.push(pair),
            }
        }
        let rest = if theirs.is_empty() { base.to_owned() } else { format!("{base}?{}", theirs.join("&")) };
        place.config = Config::from_str(&rest).map_err(|error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            bad(format!("{why}; give postgres://USER:PASSWORD@HOST:PORT/DATABASE?schema=NAME"))
        })?;
        if place.config.get_hosts().is_empty() {
            return Err(bad("it names no host; give postgres://USER@HOST/DATABASE".to_owned()));
        }
        if place.config.get_application_name().is_none() {
            place.config.application_name("steadfast");
        }
        Ok(place)
    }

    /// Hosts and ports, in the order in which they are tried.
    pub(super) fn hosts(&self) -> Vec<(String, u16)> {
        let ports = self.config.get_ports();
        let name = |host: &tokio_postgres::config::Host| match host {
            tokio_postgres::config::Host::Tcp(name) => name.clone(),
            tokio_postgres::config::Host::Unix(path) => path.display().to_string(),
        };
        let hosts = self.config.get_hosts().iter().map(name).enumerate();
        let port = |n: usize| ports.get(n).or(ports.first()).copied().unwrap_or(5432);
        hosts.map(|(n, host)| (host, port(n))).collect()
    }

    /// How long one host may take.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.config.get_connect_timeout().copied().unwrap_or(CONNECT)
    }

    /// A statement with the schema's name in it.
    pub(super) fn text(&self, text: &str) -> String {
        text.replace("{schema}", &self.schema)
    }
}

fn schema(value: &str) -> Result<String, StoreError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = value.starts_with(|c: char| c.is_ascii_lowercase() || c == '_') && !value.starts_with("pg_");
    if !begins || !value.chars().all(plain) || value.len() > SCHEMA_BYTES_MAX {
        let problem = format!(
            "schema is {value:?}; give up to {SCHEMA_BYTES_MAX} lower-case letters, digits and _, no digit first"
        );
        return Err(StoreError::Place { problem });
    }
    Ok(value.to_owned())
}

fn between(name: &str, value: &str, most: usize) -> Result<usize, StoreError> {
    value
        .parse()
        .ok()
        .filter(|n| (1..=most).contains(n))
        .ok_or_else(|| StoreError::Place { problem: format!("{name} is {value:?}; give 1 to {most}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_may_name_several_hosts_and_our_own_settings() {
        let url = "postgres://u:secret@a:5433,b:5434/db?schema=orders&prepared=off&committers=3&connect_timeout=2";
        let place = Place::parse(url).expect("it is well formed");
        assert_eq!(place.hosts(), [("a".to_owned(), 5433), ("b".to_owned(), 5434)]);
        assert_eq!((place.schema.as_str(), place.prepared, place.committers), ("orders", Prepared::Off, 3));
        assert_eq!(place.connect_timeout(), Duration::from_secs(2));
        assert_eq!(format!("{place:?}"), "postgres://a:5433,b:5434/db?schema=orders", "and never shows a password");
    }

    #[test]
    fn what_is_wrong_is_named_with_a_remedy() {
        let problem = |url: &str| Place::parse(url).expect_err("it is refused").to_string();
        insta::assert_snapshot!(
            [
                "postgres://h/db?schema=Orders",
                "postgres://h/db?schema=pg_x",
                "postgres://h/db?prepared=maybe",
                "postgres://h/db?committers=0",
                "postgres://h:port/db",
                "postgres:///db",
                "postgres://h/db?colour=red",
            ]
            .map(problem)
            .join("\n")
        );
    }
}
